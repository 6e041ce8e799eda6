"""The site that comes with the environment: a small company, made from a seed. Must not know browsers or tasks."""

from __future__ import annotations

import html
import random
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

HOST = "company.test"
"""A name that no network has: requests to it are answered here."""
HOME = f"http://{HOST}/"
STAFF_PER_PAGE = 8
DEPARTMENTS = ("Sales", "Support", "Research", "Finance")
CATEGORIES = {
    "Lamps": ("Desk lamp", "Floor lamp", "Wall lamp", "Reading lamp"),
    "Chairs": ("Office chair", "Folding chair", "Garden chair"),
    "Shelves": ("Corner shelf", "Book shelf", "Spice shelf"),
}
LANGUAGES = ("English", "German", "Italian", "Polish", "Portuguese")
_FIRST = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kai", "Lea", "Max", "Nora")
_LAST = ("Archer", "Baker", "Carver", "Dyer", "Fisher", "Gardner", "Mason", "Miller", "Potter", "Sadler", "Turner")


@dataclass(frozen=True, slots=True)
class Product:
    """Something to order."""

    name: str
    category: str
    price: int


@dataclass(frozen=True, slots=True)
class Person:
    """Someone of the company."""

    name: str
    department: str
    phone: str


@dataclass(frozen=True, slots=True)
class Page:
    """The response to a request."""

    body: str
    status: int = 200


class Site:
    """The pages of a seed, and what forms have sent."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"company {seed}")
        self.products = [
            Product(name, category, price)
            for category, names in CATEGORIES.items()
            for name, price in zip(names, chance.sample(range(12, 180), len(names)), strict=True)
        ]
        names = [f"{first} {last}" for first in _FIRST for last in _LAST]
        self.people = [
            Person(name, chance.choice(DEPARTMENTS), f"555-{chance.randint(1000, 9999)}")
            for name in sorted(chance.sample(names, 3 * STAFF_PER_PAGE - 2))
        ]
        self.records: list[dict[str, str]] = []

    def respond(self, method: str, url: str, body: str = "") -> Page:
        """Answer a request; what a form sends is recorded."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        if method == "POST":
            return self._receive(parts.path, dict(parse_qsl(body, keep_blank_values=True)))
        pages: dict[str, Callable[[dict[str, str]], str]] = {
            "/": self._home,
            "/shop": self._shop,
            "/staff": self._staff,
            "/contact": self._contact,
            "/settings": self._settings,
        }
        if parts.path not in pages:
            return Page(_page("Not found", "<p>There is no such page.</p>"), 404)
        return Page(pages[parts.path](query))

    def _receive(self, path: str, fields: dict[str, str]) -> Page:
        messages = {
            "/orders": "Thank you for your order.",
            "/messages": "Your message has been sent.",
            "/settings": "Your settings have been saved.",
        }
        if path not in messages:
            return Page(_page("Not found", "<p>There is no such form.</p>"), 404)
        self.records.append({"form": path.removeprefix("/"), **fields})
        return Page(_page("Done", f'<p role="status">{messages[path]}</p>'))

    def _home(self, query: dict[str, str]) -> str:
        return _page("Welcome", "<p>We make furniture. Use the links above.</p>")

    def _shop(self, query: dict[str, str]) -> str:
        chosen = query.get("category", "")
        options = "".join(_option(name, name == chosen) for name in CATEGORIES)
        rows = "".join(_product_row(product) for product in self.products if chosen in ("", product.category))
        return _page(
            "Shop",
            f'<form><label>Category <select name="category"><option value="">All</option>{options}</select></label> '
            f"<button>Show</button></form>"
            f"<table><thead><tr><th>Product</th><th>Category</th><th>Price</th><th>Order</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>",
        )

    def _staff(self, query: dict[str, str]) -> str:
        wanted = query.get("q", "").lower()
        people = [one for one in self.people if wanted in one.name.lower()]
        last = max(1, -(-len(people) // STAFF_PER_PAGE))
        number = query.get("page", "1")
        page = min(last, max(1, int(number))) if number.isdigit() else 1
        shown = people[(page - 1) * STAFF_PER_PAGE : page * STAFF_PER_PAGE]
        rows = "".join(f"<tr><td>{p.name}</td><td>{p.department}</td><td>{p.phone}</td></tr>" for p in shown)
        links = "".join(
            f'<a href="/staff?q={html.escape(wanted)}&amp;page={target}">{name}</a> '
            for name, target in (("Previous page", page - 1), ("Next page", page + 1))
            if 1 <= target <= last
        )
        return _page(
            "Staff",
            f'<form><label>Name <input name="q" value="{html.escape(wanted)}"></label> <button>Search</button></form>'
            f"<table><thead><tr><th>Name</th><th>Department</th><th>Phone</th></tr></thead><tbody>{rows}</tbody></table>"
            f"<p>Page {page} of {last} {links}</p>",
        )

    def _contact(self, query: dict[str, str]) -> str:
        options = "".join(_option(name, False) for name in DEPARTMENTS)
        return _page(
            "Contact",
            f'<form method="post" action="/messages">'
            f'<p><label>Department <select name="department">{options}</select></label></p>'
            f'<p><label>Your email <input name="email" type="email" required></label></p>'
            f'<p><label>Message <textarea name="message" required></textarea></label></p>'
            f'<p><label><input type="checkbox" name="copy" value="yes"> Send me a copy</label></p>'
            f"<button>Send</button></form>",
        )

    def _settings(self, query: dict[str, str]) -> str:
        options = "".join(_option(name, name == "English") for name in LANGUAGES)
        return _page(
            "Settings",
            f'<form method="post"><p><label>Language <select name="language">{options}</select></label></p>'
            f'<p><label><input type="checkbox" name="newsletter" value="yes" checked> Newsletter</label></p>'
            f"<button>Save</button></form>",
        )


def _product_row(product: Product) -> str:
    name = html.escape(product.name)
    return (
        f"<tr><td>{name}</td><td>{product.category}</td><td>{product.price} €</td><td>"
        f'<form method="post" action="/orders"><input type="hidden" name="product" value="{name}">'
        f'<label>Quantity of {name} <input name="quantity" type="number" min="1" max="99" value="1"></label> '
        f"<button>Order {name}</button></form></td></tr>"
    )


def _option(name: str, is_selected: bool) -> str:
    return f"<option{' selected' if is_selected else ''}>{name}</option>"


def _page(title: str, body: str) -> str:
    links = "".join(
        f'<a href="/{path}">{name}</a> '
        for path, name in (
            ("", "Home"),
            ("shop", "Shop"),
            ("staff", "Staff"),
            ("contact", "Contact"),
            ("settings", "Settings"),
        )
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} - Company</title>{_STYLE}</head>'
        f"<body><nav>{links}</nav><main><h1>{title}</h1>{body}</main></body></html>"
    )


_STYLE = """<style>
body { font: 16px/1.5 sans-serif; margin: 0 auto; max-width: 900px; padding: 16px }
nav { border-bottom: 1px solid #bbb; padding-bottom: 8px } nav a { margin-right: 16px }
table { border-collapse: collapse; margin: 16px 0 } td, th { border: 1px solid #ccc; padding: 4px 10px }
th { text-align: left }
input[type=number] { width: 4em } textarea { vertical-align: top; width: 20em; height: 5em } form { margin: 0 }
</style>"""
