"""Text for people: numbers of things, and names as a terminal may show them. Must not know what is said."""


def plural(n: int, one: str) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {one}s"


def size(nbytes: int) -> str:
    """Bytes for people: three digits and a unit."""
    amount, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{amount:.3g} {unit}"


def visible(text: str) -> str:
    """`text` with everything that is no visible character as an escape: a dump's names may hold terminal sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
