"""Text for people: numbers of things, and names as a terminal may show them. Must not know what is said."""


def plural(n: int, one: str) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {one}s"


def visible(text: str) -> str:
    """`text` with everything that is no visible character as an escape: a dump's names may hold terminal sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
