"""The arguments of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")


def parser() -> argparse.ArgumentParser:
    """The parser of every command; ``command`` is the one that was given."""
    found = argparse.ArgumentParser(prog="python -m lz_compile", description="Which kernels are chosen here, and why.")
    commands = found.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="write JSON")
        return command

    _add_questions(add)
    _add_models(add)
    _add_looks(
        add("doctor", "what is installed and works here, and what to do about what does not"),
        add("readiness-check", "whether this installation may go into production"),
    )
    _add_tuning(add("tune", "measure kernels over a grid of sizes; what is measured is kept, also after Ctrl-C"))
    _add_stored(add("artifacts", "files of lz_compile.save_artifacts: what is in one, or several as one"))
    _add_merging(add("perfdb", "databases of measurements: those of several machines as one"))
    _add_merging(add("decisions", "lock files of lz_compile.save_decisions: those of several machines as one"))
    _add_solving(add("solve", "the kernels for a model at every combination of sizes, as a dispatch table"))
    return found


def _add_questions(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """About one operation, and about kernels."""
    which = add("which", "the kernel for an operation on operands of given shapes")
    _add_operation(which)
    _add_tensors(which)
    listed = add("list-kernels", "every kernel, and why it cannot be used where it cannot")
    listed.add_argument("operation", nargs="?", help="attention, attention.causal, ...; by default all")
    validate = add("validate", "run a kernel on random tensors and compare it with float64")
    validate.add_argument("kernel", help="as list-kernels tells it")
    validate.add_argument("--op", metavar="OPERATION", help="of inductor: of which op; of others: the variant")
    _add_tensors(validate)


def _add_models(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """About a whole model, and what two reports of one tell."""
    explain = add("explain", "how a kernel is chosen: for operands of given shapes, or throughout a model")
    explain.add_argument("subject", nargs="?", help="an operation, or module:callable that returns (model, inputs)")
    explain.add_argument("--op", metavar="OPERATION", help="the operation, by name instead of by position")
    _add_report(explain)
    _add_tensors(explain)
    dry_run = add("dry-run", "what is chosen throughout a model, without running it where that can be avoided")
    dry_run.add_argument("subject", help="module:callable that returns (model, inputs)")
    _add_report(dry_run)
    diff = add("diff", "what changed between two reports of a model: of two days, versions or machines")
    diff.add_argument("before", help="JSON of explain --json, of report.save, or of a dump")
    diff.add_argument("after", help="the same, later or elsewhere")
    diff.add_argument("--html", metavar="FILE", help="write the later report as a page that begins with what changed")
    diff.add_argument("--exit-code", action="store_true", help="end with 1 where something changed")


def _add_stored(artifacts: argparse.ArgumentParser) -> None:
    artifacts.add_argument("action", choices=("inspect", "merge"))
    artifacts.add_argument(
        "files", nargs="+", metavar="FILE", help="the file; of merge, the one to write and then those to read"
    )


def _add_merging(files: argparse.ArgumentParser) -> None:
    files.add_argument("action", choices=("merge",))
    files.add_argument("output", metavar="OUTPUT", help="the file to write")
    files.add_argument("files", nargs="+", metavar="FILE", help="to read, the one that counts most first")


def _add_looks(doctor: argparse.ArgumentParser, ready: argparse.ArgumentParser) -> None:
    doctor.add_argument("--fix", action="store_true", help="print the commands that mend it, and nothing else")
    doctor.add_argument("--retry", action="store_true", help="try again how installed libraries import")
    ready.add_argument("--dispatch-table", metavar="FILE", help="a table that solve wrote")
    ready.add_argument("--artifacts", metavar="FILE", help="a file of lz_compile.save_artifacts that will be loaded")
    ready.add_argument("--strict", action="store_true", help="end with 1 where a check warns, too")


def _add_report(command: argparse.ArgumentParser) -> None:
    """How a model is traced, and how its report is told."""
    command.add_argument("--dynamic", action="store_true", help="trace the model for any size")
    command.add_argument("--verbose", action="store_true", help="every candidate of every kind of match in a model")
    command.add_argument("--html", metavar="FILE", help="write a model's report as one page, to be opened in a browser")
    command.add_argument("--since", metavar="FILE", help="JSON of an earlier report: the page begins with what changed")


def _add_operation(command: argparse.ArgumentParser) -> None:
    command.add_argument("operation", nargs="?", help="attention (by default), attention.causal, norm.rms, rope, ...")
    command.add_argument("--op", metavar="OPERATION", help="the same by name instead of by position")


def _add_tensors(command: argparse.ArgumentParser) -> None:
    tensors = command.add_argument_group("operands")
    tensors.add_argument(
        "--shape", type=_shape, action=_Once, default=[], metavar="[NAME=]SHAPE",
        help="of an operand, as input=64,128, once for each; without a name of the first one",
    )  # fmt: skip
    tensors.add_argument(
        "--set", type=_pair, action=_Once, default=[], metavar="NAME=VALUE", help="an attribute, as eps=1e-5"
    )
    tensors.add_argument("--dtype", choices=DTYPES, default="float32")
    tensors.add_argument("--device", help="cpu, cuda, cuda:1, ...; by default the accelerator, or the CPU")
    tensors.add_argument("--training", action="store_true", help="with gradients of all operands")
    attention = command.add_argument_group("attention alone")
    attention.add_argument("--kv-shape", type=_numbers, help="of key and value; by default that of the query")
    attention.add_argument("--layout", choices=("BHSD", "BSHD"), help="what the shapes mean; by default BHSD")
    attention.add_argument("--causal", action="store_true")
    attention.add_argument("--mask", choices=("none", "bool", "float"), default="none")
    attention.add_argument("--scale", type=float, help="of the scores; by default head_dim ** -0.5")
    attention.add_argument("--dropout", type=float, metavar="P")


def _add_tuning(command: argparse.ArgumentParser) -> None:
    _add_operation(command)
    command.set_defaults(causal=False)
    command.add_argument(
        "--sizes", type=_buckets, action=_Once, default=[], metavar="NAME=SIZES",
        help="of the operation, as num_rows=512,4096; may be given several times",
    )  # fmt: skip
    command.add_argument("--dtype", type=_dtypes, default=["float32"], help="one or more, as float32,bfloat16")
    command.add_argument("--seq-lens", type=_numbers, help="query lengths of an attention, as 128,512")
    command.add_argument("--seq-lens-k", type=_numbers, help="key lengths; by default those of the queries")
    command.add_argument("--batch-sizes", type=_numbers, help="of an attention, as the next three")
    command.add_argument("--num-heads", type=_number)
    command.add_argument("--num-kv-heads", type=_number, help="by default as many")
    command.add_argument("--head-dim", type=_number)
    command.add_argument("--mask", choices=("none", "bool", "float"), default="none")
    command.add_argument("--training", action="store_true", help="forward and backward")
    command.add_argument("--device", help="by default the accelerator, or the CPU")
    command.add_argument("--samples", type=_number, help="rounds for each problem")
    command.add_argument("--budget", type=float, metavar="SECONDS", help="begin no problem after that")
    command.add_argument("--chart", metavar="FILE", help="draw latency over size as .svg, .png or .pdf")
    command.add_argument("--no-resume", dest="resume", action="store_false", help="measure again what is known")


def _add_solving(command: argparse.ArgumentParser) -> None:
    command.add_argument("subject", help="module:callable that returns (model, inputs)")
    command.add_argument(
        "--shape-buckets", type=_buckets, action=_Once, required=True, metavar="NAME=SIZES",
        help="as seq_len=128,512,2048; may be given several times",
    )  # fmt: skip
    command.add_argument(
        "--dims", type=_position, action=_Once, default=[], metavar="NAME=POSITION",
        help="where a bucketed dimension is in the inputs, as seq_len=1; may be given several times",
    )  # fmt: skip
    command.add_argument("--output", metavar="FILE", help="write the table there")
    command.add_argument("--chart", metavar="FILE", help="draw what the choices rest on as .svg, .png or .pdf")
    command.add_argument("--tune", choices=("on-miss", "off"), default="on-miss", help="measure what was not measured")
    command.add_argument("--budget", type=float, metavar="SECONDS", help="measure no more after that")
    command.add_argument("--compile-jit", action="store_true", help="compile with Inductor as well")


class _Once(argparse.Action):
    """Adds a name with what it stands for to those before it; a name that stands twice is an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: Any = None
    ) -> None:
        before = getattr(namespace, self.dest) or []
        if values[0] in [name for name, _ in before]:
            raise argparse.ArgumentError(self, f"expected {values[0] or 'one'} once, received it again")
        setattr(namespace, self.dest, [*before, values])


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, received '{text}'")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(_number(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected numbers above 0 with commas between them, received '{text}'"
        ) from None


def _shape(text: str) -> tuple[str | None, tuple[int, ...]]:
    name, separator, shape = text.rpartition("=")
    return name if separator else None, _numbers(shape)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected a name and a value, as eps=1e-5, received '{text}'")
    return name, value


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"no dtype '{name}'; valid are {', '.join(DTYPES)}")
    return names


def _buckets(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.partition("=")
    return name, _numbers(sizes)


def _position(text: str) -> tuple[str, int]:
    name, _, position = text.partition("=")
    if not position.isdigit():
        raise argparse.ArgumentTypeError(f"expected a name and a position, as seq_len=1, received '{text}'")
    return name, int(position)
