"""``python -m rdzv.backends.sql schema --dialect postgresql`` prints the SQL that makes the tables,
for an administrator to run where jobs may not (``create_tables=false``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateSchema, CreateTable

from rdzv.backends.sql.options import SqlOptions
from rdzv.backends.sql.schema import SCHEMA_VERSION, tables
from rdzv.errors import RendezvousSettingsError

_DIALECTS: dict[str, Any] = {
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": mysql.dialect,
    "sqlite": sqlite.dialect,
}


def statements(dialect: str, table_prefix: str, schema: str | None) -> Iterator[str]:
    """What makes the tables, in order, each without a semicolon."""
    compiler = _DIALECTS[dialect]()
    made = tables(table_prefix, schema)
    if schema is not None and dialect == "postgresql":
        yield str(CreateSchema(schema, if_not_exists=True).compile(dialect=compiler))
    for table in made.metadata.sorted_tables:
        yield str(CreateTable(table).compile(dialect=compiler))
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            yield str(CreateIndex(index).compile(dialect=compiler))
    # The last one: whoever finds it knows that the others are done.
    insert = made.schema.insert().values(version=sa.literal_column(str(SCHEMA_VERSION))).inline()
    yield str(insert.compile(dialect=compiler))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rdzv.backends.sql")
    commands = parser.add_subparsers(required=True, metavar="schema")
    schema = commands.add_parser("schema", help="print the SQL that makes the tables")
    schema.add_argument("--dialect", required=True, choices=sorted(_DIALECTS))
    schema.add_argument("--table-prefix", default=SqlOptions().table_prefix)
    schema.add_argument("--schema", help="the schema, on MySQL the database, of the tables")
    given = parser.parse_args(arguments)
    try:
        options = SqlOptions(table_prefix=given.table_prefix, schema=given.schema)
    except RendezvousSettingsError as error:
        parser.error(str(error))
    for statement in statements(given.dialect, options.table_prefix, options.schema):
        sys.stdout.write(f"{statement.strip()};\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
