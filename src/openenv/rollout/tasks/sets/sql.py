"""SQL: one SELECT for a SQLite database, checked with another database of the same schema."""

from __future__ import annotations

import sqlite3
from random import Random

from openenv.rollout.tasks.checks import Check
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.task_sets import TaskSet

from .answers import NAMES, WORDS

_SCHEMA = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, item TEXT, amount INTEGER, price INTEGER);
"""
_RUN = """import sqlite3

db = sqlite3.connect(":memory:")
with open("checks/data.sql") as data:
    db.executescript(data.read())
with open("query.sql") as query:
    for row in db.execute(query.read()):
        print(*row, sep="|")
"""


def _questions(random: Random, item: str, city: str) -> tuple[str, str]:
    """Return a question and its query. Every question fixes the order of the rows."""
    least = random.randint(2, 4)
    most = random.randint(2, 4)
    return random.choice(
        (
            (
                "the names of all customers in alphabetical order, each with the sum of amount times price of its "
                "orders (0 without orders)",
                "SELECT name, COALESCE(SUM(amount * price), 0) FROM customers LEFT JOIN orders "
                "ON orders.customer_id = customers.id GROUP BY customers.id ORDER BY name",
            ),
            (
                f"in alphabetical order the names of the customers who never ordered '{item}'",
                f"SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders WHERE item = '{item}') "
                "ORDER BY name",
            ),
            (
                f"the cities with at least {least} orders, each with its number of orders, in alphabetical order",
                "SELECT city, COUNT(*) FROM customers JOIN orders ON orders.customer_id = customers.id GROUP BY city "
                f"HAVING COUNT(*) >= {least} ORDER BY city",
            ),
            (
                f"the IDs of the {most} orders with the highest amount times price of customers from '{city}', the "
                "highest first; equal ones by ID",
                "SELECT orders.id FROM orders JOIN customers ON orders.customer_id = customers.id "
                f"WHERE city = '{city}' ORDER BY amount * price DESC, orders.id LIMIT {most}",
            ),
            (
                "for each item in alphabetical order its highest price, and the name of the customer of that order; of "
                "several such orders the one with the lowest ID",
                "SELECT item, price, name FROM orders JOIN customers ON orders.customer_id = customers.id "
                "WHERE NOT EXISTS (SELECT 1 FROM orders AS other WHERE other.item = orders.item AND "
                "(other.price > orders.price OR other.price = orders.price AND other.id < orders.id)) ORDER BY item",
            ),
        )
    )


def _data(random: Random, items: list[str], cities: list[str]) -> str:
    """Return the statements that fill a database."""
    customers = [(number, name, random.choice(cities)) for number, name in enumerate(random.sample(NAMES, 8), 1)]
    orders = [
        # The last two customers order nothing.
        (number, random.randint(1, 6), random.choice(items), random.randint(1, 9), random.randint(1, 40))
        for number in range(1, 21)
    ]
    lines = [f"INSERT INTO customers VALUES {row};" for row in customers]
    return _SCHEMA + "\n".join([*lines, *(f"INSERT INTO orders VALUES {row};" for row in orders)]) + "\n"


def _draw(random: Random) -> Task:
    items, cities = random.sample(WORDS, 5), random.sample(WORDS, 3)
    question, query = _questions(random, items[0], cities[0])
    example = _data(random, items, cities)
    # An empty result, or the result for the example, must not pass.
    rows = shown = _rows(example, query)
    while not rows or rows == shown:
        hidden = _data(random, items, cities)
        rows = _rows(hidden, query)
    return Task(
        instruction=f"""shop.db is a SQLite database with this schema:

{_SCHEMA}
Write query.sql with a single SELECT that returns {question}. It must work for other data as well.
""",
        files={"data.sql": example},
        setup=(
            'python3 -c \'import sqlite3; sqlite3.connect("shop.db").executescript(open("data.sql").read())\' '
            "&& rm data.sql",
        ),
        verify=(
            Check(
                run="python3 checks/run.py",
                judge='cmp "$OUTPUT/stdout" checks/expected.txt',
                needs=("checks/run.py", "checks/data.sql"),
            ),
        ),
        verify_files={"checks/run.py": _RUN, "checks/data.sql": hidden, "checks/expected.txt": rows},
        solution=(f"cat > query.sql <<'END'\n{query}\nEND",),
        metadata={"answer": "query.sql"},
    )


def _rows(data: str, query: str) -> str:
    """Return the printed rows of a query."""
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(data)
        return "".join("|".join(map(str, row)) + "\n" for row in db.execute(query))
    finally:
        db.close()


SQL = TaskSet("sql", "one SELECT for a SQLite database", "judged", _draw)
