"""How fast and how faithful: measures, tables and plots."""
