"""The `blend-rag` command: `demo`, `ask`, `warm`, `store`, `serve`, `fidelity`, `doctor`.

Results go to stdout, progress and errors to stderr; with `--json` stdout holds JSON alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import blend_rag
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.selectors import SELECTORS
from blend_rag.engines.base import Engine
from blend_rag.errors import BlendRagError, StoreError
from blend_rag.evaluation.calibration import Calibration, chosen_policy
from blend_rag.folders import cache_folder
from blend_rag.in_band import IN_BAND_SEPARATOR
from blend_rag.stores import KVStore, open_store

app = typer.Typer(no_args_is_help=True, add_completion=False, help=blend_rag.__doc__)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
store_app = typer.Typer(no_args_is_help=True, help="Look after stored chunk KV.")
app.add_typer(store_app, name="store")
DEFAULT = RecomputePolicy()

Model = Annotated[
    str | None, typer.Option(help="Model folder, .gguf file or hub id. Left out: the packaged SmolLM2-135M-Instruct.")
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="transformers (in this process), vllm (vLLM in this process), or the URL of a vLLM server with the "
        "connector, which keeps the KV itself; its API key is $VLLM_API_KEY.",
    ),
]
Ratio = Annotated[float, typer.Option(help="Share of reused chunk tokens to recompute, 0 to 1.")]
SelectorName = Annotated[str, typer.Option(help=f"Which tokens to recompute: {', '.join(SELECTORS)}.")]
System = Annotated[str, typer.Option(help="System prompt; KV is warmed behind it, so `warm` and `ask` must agree.")]
Stores = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        help="Where chunk KV is kept: file:///folder, redis://host, lmcache+resp://host, memory://. Given several "
        "times: tiers, front to back. Left out: $BLEND_RAG_STORE, else a folder in the user's cache.",
    ),
]
AllowUnsigned = Annotated[
    bool, typer.Option(help="Use a shared tier without $BLEND_RAG_STORE_SECRET. Whoever writes to it changes answers.")
]
Namespace = Annotated[str, typer.Option(help="KV of one namespace is never seen by another.")]
SYSTEM = "Answer the question from the passages, briefly."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


def main() -> None:
    """Run the command; what goes wrong on a user's side is one line and a non-zero exit."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        app(standalone_mode=True)
    except BlendRagError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _open(stores: list[str] | None, allow_unsigned: bool) -> KVStore:
    """The store that options or the environment name."""
    named = stores or os.environ.get("BLEND_RAG_STORE", "").split()
    if not named:
        try:
            return open_store((cache_folder() / "kv").absolute().as_uri())
        except StoreError as error:
            msg = f"{error}; or set BLEND_RAG_CACHE to another folder"
            raise StoreError(msg) from error
    return open_store(named[0] if len(named) == 1 else named, allow_unsigned=allow_unsigned)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(blend_rag.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Reuse the KV of retrieved chunks anywhere in a prompt."""


def _store_urls(stores: list[str] | None) -> list[str]:
    return stores or os.environ.get("BLEND_RAG_STORE", "").split() or [(cache_folder() / "kv").absolute().as_uri()]


@contextmanager
def _engine(
    name: str,
    model: str | None,
    stores: list[str] | None,
    allow_unsigned: bool,
    namespace: str,
    policy: RecomputePolicy | None = None,
) -> Iterator[Engine]:
    """An engine with the store that options or the environment name; a server has its own."""
    if name == "transformers":
        with (
            closing(_open(stores, allow_unsigned)) as kept,
            blend_rag.load_engine(
                model, policy=policy, store=kept, namespace=namespace, show_progress=True
            ) as embedded,
        ):
            yield embedded
        return
    given: dict[str, Any] = {"policy": policy, "show_progress": True}
    if name == "vllm":
        urls = _store_urls(stores)
        given |= {"store": urls if len(urls) > 1 else urls[0], "allow_unsigned": allow_unsigned}
    elif stores:
        given["store"] = stores  # refused in words
    if namespace:
        given["namespace"] = namespace
    with closing(blend_rag.load_engine(model, engine=name, **given)) as engine:
        yield engine


@app.command()
def demo(
    model: Model = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Where report.json and ttft.png go.")] = Path("build/demo"),
    ratio: Ratio = DEFAULT.ratio,
    selector: SelectorName = DEFAULT.selector,
    questions: Annotated[int, typer.Option(min=1, help="How many of the built-in questions to ask.")] = 7,
    k: Annotated[int, typer.Option(min=1, help="Passages per question.")] = 6,
    as_json: AsJson = False,
) -> None:
    """Ingest Python's language reference, warm its KV, answer questions, compare with full prefill."""
    from blend_rag.demo import QUESTIONS, Answered, Library, run_demo, summarise, write_report
    from blend_rag.evaluation.report import demo_table

    say = err if as_json else out
    policy = RecomputePolicy(ratio=ratio, selector=selector)
    with blend_rag.load_engine(model, policy=policy, show_progress=True) as engine:
        say.print(f"model [bold]{escape(engine.model_name)}[/bold] on {engine.device}, self-test passed")
        library = Library.of_reference(engine)
        say.print(f"{len(library.passages)} passages of the Python language reference embedded and indexed")
        warmed = engine.warm(library.prompts, library.passages, show_progress=True)
        say.print(f"KV of {warmed.tokens_computed:,} tokens warmed in {warmed.seconds:.0f} s, once for all questions")

        def ask(question: str, number: int) -> None:
            say.print(f"\n[bold]{number}. {escape(question)}[/bold]")

        def tell(answered: Answered) -> None:
            sources = ", ".join(passage.source or "?" for passage in answered.passages)
            say.print(f"\n[dim]sources: {escape(sources)}\n{escape(str(answered.generation.report))}[/dim]")

        rows: list[dict[str, Any]] = []
        show = lambda text: say.print(escape(text), end="", soft_wrap=True)  # noqa: E731
        for row in run_demo(library, QUESTIONS[:questions], k=k, show=show, on_question=ask, on_answer=tell):
            if not rows:
                say.print("\ncomparing with full prefill, in turn in this process …")
            rows.append(row)
        report = summarise(engine, rows)
    write_report(report, out_folder)
    if as_json:
        print(json.dumps(report, indent=2))  # noqa: T201
        return
    out.print(demo_table(report["questions"]))
    out.print(
        f"median speed-up of the first token ×{report['ttft_speedup_median']:.1f}; mean KL to full prefill "
        f"{report['kl_to_full_mean']:.3f} (reuse without recomputation {report['kl_reuse_only_mean']:.3f})"
    )
    out.print(f"written: {out_folder / 'report.json'}, {out_folder / 'ttft.png'}")


@app.command()
def ask(
    questions: Annotated[list[str], typer.Argument(help="One or more questions.")],
    docs: Annotated[
        list[Path] | None, typer.Option(help="Text files or folders. Left out: Python's language reference.")
    ] = None,
    model: Model = None,
    engine_name: EngineOption = "transformers",
    ratio: Ratio = DEFAULT.ratio,
    selector: SelectorName = DEFAULT.selector,
    system: System = SYSTEM,
    store: Stores = None,
    allow_unsigned: AllowUnsigned = False,
    namespace: Namespace = "",
    target: Annotated[
        float | None,
        typer.Option(
            help="Instead of ratio and rule: the share of the gap to full prefill to close, by --calibration."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What `blend-rag fidelity --json` wrote for this model.")
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Passages per question.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    as_json: AsJson = False,
) -> None:
    """Answer questions from documents; the KV of their passages is computed once and kept in the store."""
    from blend_rag.corpus import load_documents
    from blend_rag.demo import Library

    say = err if as_json else out
    if not all(question.strip() for question in questions):
        msg = "the question is empty: pass a question with at least one word"
        raise BlendRagError(msg)
    policy = RecomputePolicy(ratio=ratio, selector=selector)
    if target is not None:
        policy = chosen_policy(policy, target=target, calibration=calibration)
    with _engine(engine_name, model, store, allow_unsigned, namespace, policy) as engine:
        if target is not None and calibration is not None:
            Calibration.read(calibration).check_model(engine.model_name)
        prompts = blend_rag.PromptBuilder(engine.tokenizer, system=system)
        library = (
            Library.of(engine, prompts, load_documents(docs, prompts.tokenizer.count))
            if docs
            else Library.of_reference(engine)
        )
        found = [hit.passage for question in questions for hit in library.retriever.search(question, k)]
        engine.warm(library.prompts, found, context=policy.context, show_progress=True)
        results: list[dict[str, Any]] = []
        for question in questions:
            say.print(f"[bold]{escape(question)}[/bold]")
            answered = library.answer(
                question, k, max_tokens, lambda text: say.print(escape(text), end="", soft_wrap=True)
            )
            sources = [passage.source for passage in answered.passages]
            report = answered.generation.report
            say.print(f"\n[dim]sources: {escape(', '.join(map(str, sources)))}\n{escape(str(report))}[/dim]\n")
            results.append(
                {
                    "question": question,
                    "answer": answered.generation.text,
                    "finish_reason": answered.generation.finish_reason,
                    "sources": sources,
                    "report": report.as_dict(),
                }
            )
    if as_json:
        print(json.dumps({"model": engine.model_name, "answers": results}, indent=2))  # noqa: T201


@app.command()
def warm(
    paths: Annotated[list[Path], typer.Argument(help="Text files, or folders of .txt, .md and .rst files.")],
    model: Model = None,
    engine_name: EngineOption = "transformers",
    system: System = SYSTEM,
    context: Annotated[str, typer.Option(help="What passages are computed behind: prefix, or alone.")] = "prefix",
    store: Stores = None,
    allow_unsigned: AllowUnsigned = False,
    namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:
    """Compute the KV of documents and keep it; what is there already is skipped."""
    from blend_rag.warming import warm_documents

    with _engine(engine_name, model, store, allow_unsigned, namespace) as engine:
        prompts = blend_rag.PromptBuilder(engine.tokenizer, system=system)
        warmed = warm_documents(engine, prompts, paths, context=context, show_progress=True)
        report = warmed.report
        kept = getattr(engine, "store", None)
        tier = kept.stats(namespace).tier if kept else engine_name
        done = {"documents": warmed.documents, "passages": warmed.passages, **asdict(report)}
        if as_json:
            print(json.dumps({"model": engine.model_name, "store": tier, **done}, indent=2))  # noqa: T201
        else:
            out.print(
                f"{report.chunks} chunks of {warmed.documents} documents in {escape(tier)}: {report.computed} computed "
                f"({report.tokens_computed:,} tokens, {report.seconds:.0f} s), {report.present} were there",
                soft_wrap=True,
            )
            if report.refused:
                out.print(f"[red]not kept everywhere:[/red] {escape(report.refused[0])}", soft_wrap=True)
    if report.refused:
        raise typer.Exit(1)


@store_app.command()
def stats(
    store: Stores = None,
    allow_unsigned: AllowUnsigned = False,
    namespace: Annotated[str | None, typer.Option(help="Of one namespace. Left out: of all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much is kept, per tier."""
    with closing(_open(store, allow_unsigned)) as kept:
        found = kept.stats(namespace)
    if as_json:
        print(json.dumps(asdict(found), indent=2))  # noqa: T201
        return
    for tier in found.tiers or (found,):
        size = "size unknown" if tier.bytes is None else f"{tier.bytes / 1e6:,.1f} MB"
        bound = "" if tier.max_bytes is None else f" of {tier.max_bytes / 1e6:,.0f} MB"
        chunks = "chunks unknown" if tier.chunks is None else f"{tier.chunks:,} chunks"
        out.print(f"{escape(tier.tier)}: {chunks}, {size}{bound}", soft_wrap=True)


@store_app.command()
def verify(
    store: Stores = None,
    allow_unsigned: AllowUnsigned = False,
    namespace: Annotated[str | None, typer.Option(help="In one namespace. Left out: in all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read everything that is kept and compare it; damaged files on disk are dropped."""
    with closing(_open(store, allow_unsigned)) as kept:
        found = kept.verify(namespace)
    if as_json:
        print(json.dumps(asdict(found), indent=2))  # noqa: T201
    else:
        out.print(f"{found.checked:,} chunks read, {len(found.damaged)} damaged")
        for digest in found.damaged:
            out.print(f"  {digest}")
    if found.damaged:
        raise typer.Exit(1)


@store_app.command()
def purge(
    store: Stores = None,
    allow_unsigned: AllowUnsigned = False,
    namespace: Annotated[str | None, typer.Option(help="Everything of one namespace.")] = None,
    document: Annotated[str | None, typer.Option(help="KV that only this document uses: its path or id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete stored KV: of a document, of a namespace, or all."""
    if everything == (namespace is not None or document is not None):
        msg = "say what to delete: --document, --namespace, or --all"
        raise BlendRagError(msg)
    with closing(_open(store, allow_unsigned)) as kept:
        if document is not None:
            path = Path(document)
            name = str(path.resolve()) if path.exists() else document
            removed = kept.delete_document(name, namespace or "")
        else:
            removed = kept.purge(namespace)
    if as_json:
        print(json.dumps({"removed": removed}))  # noqa: T201
    else:
        out.print(f"{removed:,} chunks deleted")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model folder, .gguf file or hub id.")],
    run: Annotated[bool, typer.Option("--run", help="Start the server instead of printing its command.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    served_model: Annotated[str | None, typer.Option("--served-model-name", help="Name that clients use.")] = None,
    ratio: Ratio = DEFAULT.ratio,
    selector: SelectorName = DEFAULT.selector,
    store: Annotated[
        list[str] | None,
        typer.Option(
            "--store", help="Lasting or shared store behind the server's memory: file:///folder, redis://host."
        ),
    ] = None,
    allow_unsigned: AllowUnsigned = False,
    namespace: Namespace = "",
    separator: Annotated[
        str, typer.Option(help="Border around passages in prompts of ordinary clients; empty looks for none.")
    ] = IN_BAND_SEPARATOR,
    as_json: AsJson = False,
) -> None:
    """Print (or with --run start) the command that serves MODEL with vLLM and the connector on this machine.

    Further arguments go to vLLM, for example --tensor-parallel-size 2 or --max-model-len 32768.
    """
    from blend_rag.engines.vllm_setup import Machine, Memory, connector_config, installed_vllm, server_command

    machine = Machine.here()
    memory = Memory.of(machine, _ranks(context.args))
    config = connector_config(
        policy=RecomputePolicy(ratio=ratio, selector=selector),
        store=store,
        allow_unsigned=allow_unsigned,
        namespace=namespace,
        gpu_bytes=memory.gpu_bytes,
        host_bytes=memory.host_bytes,
        separator=separator,
    )
    if run or model.lower().endswith(".gguf"):
        from blend_rag.engines.loading import resolve_model

        if Path(model).expanduser().exists():
            model = str(resolve_model(model))
    command = server_command(
        model, config, machine, memory, host=host, port=port, served_model=served_model, extra=context.args
    )
    if as_json:
        found = {"arguments": command.arguments, "environment": dict(command.environment)}
        print(json.dumps(found, indent=2))  # noqa: T201
    elif not run:
        print(command)  # noqa: T201
    if not run:
        return
    if installed_vllm() is None:
        msg = "vLLM is not installed in this environment: pip install vllm, or run the printed command where it is"
        raise BlendRagError(msg)
    os.environ |= {**command.environment, **os.environ}
    sys.stdout.flush()
    os.execv(command.arguments[0], command.arguments)


def _numbers(given: str) -> list[float]:
    """Comma-separated numbers."""
    try:
        return [float(part) for part in given.split(",") if part.strip()]
    except ValueError as error:
        msg = f"{given!r} is no list of numbers: write for example 0.15,0.3"
        raise BlendRagError(msg) from error


@app.command()
def fidelity(
    model: Model = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON-lines file with question, passages and perhaps answers in each row. Left out: built-in "
            "questions about Python's language reference."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Documents, from the beginning.")] = 40,
    ratios: Annotated[str, typer.Option(help="Shares to recompute, with commas between.")] = "0.15,0.3",
    selectors: Annotated[str, typer.Option(help="Rules to compare, with commas between.")] = ",".join(SELECTORS),
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where a picture of KL and speed against the ratio goes.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Recommend a policy that closes this share of the gap to full prefill.")
    ] = None,
    probes: Annotated[
        int, typer.Option(min=0, help="Prompts of each made-up task whose answer needs several chunks; 0: none.")
    ] = 0,
    answers: Annotated[bool, typer.Option(help="Let every policy answer and score it by F1 and exact match.")] = False,
    passages: Annotated[int, typer.Option(min=1, help="Passages of each document.")] = 6,
    passage_tokens: Annotated[int, typer.Option(min=1, help="Longest passage; what is longer is cut.")] = 256,
    timed: Annotated[int, typer.Option(min=0, help="Documents to take times on.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the random rule, the made-up tasks and the intervals.")] = 0,
) -> None:
    """Measure what recomputing less costs in quality on MODEL and DATA, beside full prefill and simple baselines.

    A run that was broken off goes on where it stopped when it is started again with the same options.
    """
    from blend_rag.evaluation.report import fidelity_table, plot_fidelity, probe_table
    from blend_rag.study import Study

    study = Study(
        data=data,
        limit=limit,
        ratios=tuple(_numbers(ratios)),
        selectors=tuple(name.strip() for name in selectors.split(",") if name.strip()),
        probes=probes,
        answers=answers,
        passages=passages,
        passage_tokens=passage_tokens,
        timed=timed,
        seed=seed,
    )
    with blend_rag.load_engine(model, show_progress=True) as engine:
        report = study.run(engine, show_progress=True)
    out.print(fidelity_table(report["arms"], report["documents"]))
    if report["probes"]:
        out.print(probe_table(report["probes"]))
    if plot:
        plot_fidelity(report["arms"], plot)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    study.forget_progress()
    if target is not None:
        chosen = Calibration.of(report).policy(target)
        out.print(
            f"to close {target:g} of the gap: --selector {chosen.selector} --ratio {chosen.ratio:g}, chunks computed "
            f"{'behind the prefix' if chosen.context == 'prefix' else 'alone'}"
        )


def _ranks(arguments: list[str]) -> int:
    """Ranks of a server by what vLLM is told."""
    for name, value in pairwise([*" ".join(arguments).replace("=", " ").split(), ""]):
        if name in ("--tensor-parallel-size", "-tp") and value.isdecimal():
            return max(1, int(value))
    return 1


@app.command()
def doctor(model: Model = None, engine_name: EngineOption = "transformers", as_json: AsJson = False) -> None:
    """Prove on your model that a warmed chunk is reused at another position and that answers stay right."""
    from blend_rag.doctor import diagnose

    checks = diagnose(model, engine_name)
    failed = [check for check in checks if not check.ok]
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [check.as_dict() for check in checks]}, indent=2))  # noqa: T201
    else:
        for check in checks:
            mark = "[green]ok[/green]  " if check.ok else "[red]FAIL[/red]"
            out.print(f"{mark} {escape(check.name)}: {escape(check.detail)}", soft_wrap=True)
            if not check.ok:
                out.print(f"     → {escape(check.remedy)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
