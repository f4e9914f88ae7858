"""Pages for people: the demo page and a short manual, each whole in one file, with no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("page.html")

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "code,pre{font:14px/1.4 ui-monospace,monospace;background:#f3f3f3}pre{padding:.8rem;overflow-x:auto}"
    "h2{margin-top:2rem}"
)


class Page:
    """HTML and the policy that lets exactly its own scripts and styles run."""

    def __init__(self, html: str) -> None:
        self.html = html
        scripts = _hashes(r"<script\b[^>]*>(.*?)</script>", html)
        styles = _hashes(r"<style\b[^>]*>(.*?)</style>", html)
        self.headers = {
            "content-security-policy": "; ".join(
                [
                    "default-src 'none'",
                    f"script-src {scripts}",
                    f"style-src {styles}",
                    "img-src 'self' data: blob:",
                    "connect-src 'self'",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                ]
            )
        }


def load_page(path: Path = PAGE) -> Page | None:
    """The demo page with ``page.css`` and ``page.js`` put inside it, or nothing where there is none."""
    if not path.is_file():
        return None
    html = path.read_text(encoding="utf-8")
    links = {
        r'<link\b[^>]*\bhref="page\.css"[^>]*>': ("page.css", "style"),
        r'<script\b[^>]*\bsrc="page\.js"[^>]*>\s*</script>': ("page.js", "script"),
    }
    for pattern, (name, tag) in links.items():
        beside = path.with_name(name)
        if beside.is_file():
            inside = f"<{tag}>\n{beside.read_text(encoding='utf-8')}</{tag}>"
            # Splitting, because a replacement would read the script's backslashes as its own.
            html = inside.join(re.split(pattern, html))
    return Page(html)


def manual(openapi: dict[str, Any]) -> Page:
    """The routes with their examples, made from the OpenAPI document."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(openapi['info']['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(openapi['info']['title'])}</h1>",
        f"<p>{escape(openapi['info']['description'])}</p>",
        '<p>The machine-readable form of this page is <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            if description := operation.get("description"):
                parts.append(f"<pre>{escape(description)}</pre>")
    return Page("\n".join(parts))


def _hashes(pattern: str, html: str) -> str:
    """CSP sources for the inline blocks that a pattern finds.

    >>> _hashes(r"<style>(.*?)</style>", "<style></style>")
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
    """
    blocks = re.findall(pattern, html, flags=re.DOTALL | re.IGNORECASE)
    digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
