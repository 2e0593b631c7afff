"""Shipped for tests of anything that reads data: a tiny seeded data set, ways to spoil it, and the conformance suite.

    write_tiny, tiny_schema, tiny_table   a data set with every kind of column, in many small files and row groups
    write_tiny_requests, ...              the same of requests
    DAMAGES, damage                       every kind of bad input, as data, and where the error must point
    batch_difference                      where two batches differ, bit for bit
    conformance_cases                     what any Loader must do; `Quirks` says what an implementation leaves out

An implementation outside this repository proves itself with

    from gem_data.testing import Quirks, conformance_cases
    @pytest.mark.parametrize("case", conformance_cases(Quirks()), ids=lambda case: case.name)
    def test_conformance(case, tmp_path):
        case.run(lambda directory, **arguments: MyLoader(directory, **arguments), tmp_path)
"""

from gem_data.conformance import Case, LoaderFactory, Quirks, batch_difference, conformance_cases
from gem_data.damage import DAMAGES, Damage, damage
from gem_data.tiny import (
    TINY_START,
    tiny_request_schema,
    tiny_request_table,
    tiny_schema,
    tiny_table,
    write_tiny,
    write_tiny_requests,
)

__all__ = [
    "DAMAGES",
    "TINY_START",
    "Case",
    "Damage",
    "LoaderFactory",
    "Quirks",
    "batch_difference",
    "conformance_cases",
    "damage",
    "tiny_request_schema",
    "tiny_request_table",
    "tiny_schema",
    "tiny_table",
    "write_tiny",
    "write_tiny_requests",
]
