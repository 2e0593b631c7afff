"""gemline data prepare | inspect | verify | requests | impressions | ledger"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gem_pipelines.cli.parser import Parser
from gem_pipelines.errors import ConfigError, did_you_mean

_VERBS = ("prepare", "inspect", "verify", "requests", "impressions", "ledger")


def main(arguments: Sequence[str]) -> int:
    """Run one verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: gemline data prepare NAME --out DIR [--rows-per-group N] [option=value ...]\n"
            "       gemline data inspect DIR\n       gemline data verify DIR\n"
            "       gemline data requests DIR --out DIR --impression COLUMN ... [--rows-per-group N]\n"
            "       gemline data impressions DIR --out DIR [--rows-per-group N]\n       gemline data ledger RUN"
        )
        return 0 if arguments else 1
    verb, rest = arguments[0], arguments[1:]
    if verb not in _VERBS:
        raise ConfigError(f"unknown command 'data {verb}'; {did_you_mean(verb, _VERBS)}")
    verbs = {"prepare": prepare, "inspect": inspect, "verify": verify, "ledger": ledger}
    return (verbs | {"requests": requests, "impressions": impressions})[verb](rest)


def prepare(arguments: Sequence[str]) -> int:
    """Fetch or generate a data set and write it in the native layout."""
    parser = Parser(
        prog="gemline data prepare", description="Fetch or generate a data set and write it in the native layout."
    )
    parser.add_argument("name", help="name of the data set")
    parser.add_argument("options", nargs="*", help="options of the data set as name=value, e.g. rows=5000")
    parser.add_argument("--out", required=True, help="directory to make")
    _add_rows_per_group(parser, "as many as decode to about 8 MiB")
    known = parser.parse_intermixed_args(arguments)
    from gem_pipelines.data_source import prepare_named

    schema = prepare_named(known.name, known.options, Path(known.out), say=print, rows_per_group=known.rows_per_group)
    for split in ("train", "eval"):
        rows = sum(file.rows for file in schema.files if file.split == split)
        print(f"{split}: {rows:,} rows")
    print(f"ready: gemline train --data {known.out} ...")
    return 0


def inspect(arguments: Sequence[str]) -> int:
    """Print what is in a data set, as JSON."""
    directory = _argument("inspect", "Rows, lengths, label rates and time span of a data set, as JSON.", arguments)
    from gem_data.api import inspect_dataset

    from gem_pipelines.rundir import finite

    print(json.dumps(finite(inspect_dataset(directory)), indent=2))
    return 0


def verify(arguments: Sequence[str]) -> int:
    """Check every byte and rule of a data set; exit code 1 where one is broken."""
    directory = _argument("verify", "Check checksums, types, ranges and time order of a data set.", arguments)
    from gem_data.api import verify_dataset

    report = verify_dataset(directory)
    print(report)
    return 0 if report.ok else 1


def requests(arguments: Sequence[str]) -> int:
    """Join samples that were shown together into rows that are requests."""
    parser = Parser(
        prog="gemline data requests",
        description="Write a data set of samples as one of requests: neighbouring samples of one user and timestamp "
        "that differ only in the named columns become one row, which has the user's part once. Nothing is lost.",
    )
    parser.add_argument("directory", help="data set of samples")
    parser.add_argument("--out", required=True, help="directory to make")
    parser.add_argument(
        "--impression",
        nargs="+",
        required=True,
        help="columns that each impression has of its own, e.g. id.item dense.bid (labels and weights always are)",
    )
    _add_rows_per_group(parser, "the requests that begin in a row group of DIR")
    known = parser.parse_args(arguments)
    from gem_data.api import group_requests

    schema = group_requests(
        known.directory, known.out, impression=known.impression, rows_per_group=known.rows_per_group
    )
    print(f"ready: {sum(file.rows for file in schema.files):,} requests in {known.out}")
    return 0


def impressions(arguments: Sequence[str]) -> int:
    """Write requests as a row for each impression: the inverse of `requests`."""
    parser = Parser(
        prog="gemline data impressions",
        description="Write a data set of requests with a row for each impression, each with a copy of the user's part.",
    )
    parser.add_argument("directory", help="data set of requests")
    parser.add_argument("--out", required=True, help="directory to make")
    _add_rows_per_group(parser, "the samples of a row group of DIR")
    known = parser.parse_args(arguments)
    from gem_data.api import expand_requests

    schema = expand_requests(known.directory, known.out, rows_per_group=known.rows_per_group)
    print(f"ready: {sum(file.rows for file in schema.files):,} samples in {known.out}")
    return 0


def ledger(arguments: Sequence[str]) -> int:
    """Compare a run's ledger with its data; exit code 1 where a sample was lost or trained twice."""
    about = "Whether every sample of the training split was trained exactly once (runs with --train.ledger True)."
    run = Path(_argument("ledger", about, arguments))
    from gem_data.api import data_path

    from gem_pipelines.data_source import cache_directory
    from gem_pipelines.ledger import verify_run
    from gem_pipelines.rundir import RunDirectory

    config = RunDirectory(run).read_config().data
    source = data_path(config.source)
    data = source if (source / "schema.json").is_file() else cache_directory(config)
    report = verify_run(run, data, config)
    print(
        f"{run}: {report.steps} steps, {report.complete} whole epochs, {report.trained:,} samples trained, "
        f"{report.skipped:,} left out, {len(report.lost):,} lost, {len(report.twice):,} twice"
    )
    if report.dropped:
        print(f"{report.dropped:,} left out at the ends of epochs, as data.drop_last asks")
    if report.pending:
        print(f"{report.pending:,} of the unfinished epoch not yet trained")
    for name, ids in (("lost", report.lost), ("twice", report.twice)):
        if ids:
            print(f"{name}: {', '.join(map(str, ids[:20]))}{', ...' if len(ids) > 20 else ''}")
    return 0 if report.ok else 1


def _add_rows_per_group(parser: Parser, default: str) -> None:
    parser.add_argument(
        "--rows-per-group",
        type=int,
        metavar="N",
        help=f"rows of a row group, of which windows of time (data.stream_seconds) are made; default: {default}",
    )


def _argument(verb: str, description: str, arguments: Sequence[str]) -> str:
    parser = Parser(prog=f"gemline data {verb}", description=description)
    parser.add_argument("directory")
    directory: str = parser.parse_args(arguments).directory
    return directory
