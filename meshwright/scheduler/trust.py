"""One secret per job, a proof of it that tells nobody what it is, and TLS around all of it.

Each side sends a fresh nonce and answers with an HMAC over its role, both nonces and the certificate that it sees. A
recording is of no use, since nonces differ; who sits in between has another certificate, and so another proof. That is
why certificates made for one job need no authority: see decision 20.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shutil
import ssl
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import LaunchError

SECRET = "MESHWRIGHT_SECRET"
SECRET_FILE = "MESHWRIGHT_SECRET_FILE"
INSECURE = "MESHWRIGHT_INSECURE"  # 1: without a secret, anybody may take part
LEAST_CHARACTERS = 20  # of a secret: a shorter one could be guessed from a recording
NONCE_BYTES = 32
OPENSSL = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=meshwright"
FILES = ("ca.pem", "cert.pem", "key.pem")


@dataclass(frozen=True, slots=True)
class Trust:
    """`secret`: empty where anybody is trusted, and then there is no TLS either. `certificates`: a folder of the
    user's, else one is made for the job."""

    secret: str = ""
    certificates: Path | None = None

    def __repr__(self) -> str:  # neither a log nor a traceback shall have it
        return f"Trust(secret={'…' if self.secret else None}, certificates={self.certificates})"


def proof(secret: str, role: str, client: bytes, server: bytes, certificate: bytes) -> bytes:
    """Return a proof to the sender of a nonce that `role` knows the secret. `certificate`: the server's, as DER."""
    seen = hashlib.sha256(certificate).digest()
    return hmac.new(secret.encode(), b"\0".join((role.encode(), client, server, seen)), "sha256").digest()


def same(one: bytes, other: bytes) -> bool:
    """Return whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def find_secret(path: Path | None, *, make: bool) -> str:
    """The job's secret: of `path`, else of the environment; empty if there is none. `make`: write a file that is not
    there. Raises LaunchError for one that is too short or that others can read."""
    told, file = os.environ.get(SECRET, ""), os.environ.get(SECRET_FILE, "")
    if path is None and told:
        return _long_enough(told, SECRET)
    if path is None and not file:
        return ""
    path, option = (path, "--secret") if path is not None else (Path(file), SECRET_FILE)
    if make and not path.exists():
        _make(path, option)
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "copy it from the machine of the scheduler, which makes it"
        raise LaunchError(f"{option}: cannot read the secret {path}", why=why, hint=hint) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        why = f"its mode is {stat.S_IMODE(mode):o}: others on this machine can read it"
        raise LaunchError(f"{option}: {path} is not a secret", why=why, hint=f"chmod 600 {path}")
    return _long_enough(text, f"{option}: {path}")


def _make(path: Path, option: str) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
    except FileExistsError:  # another launcher of this machine was faster
        return
    except OSError as error:
        raise LaunchError(f"{option}: cannot write {path}", why=error.strerror or str(error)) from None


def _long_enough(text: str, what: str) -> str:
    if len(text) < LEAST_CHARACTERS:
        why = f"a secret of {len(text)} characters can be guessed; it has at least {LEAST_CHARACTERS}"
        raise LaunchError(
            f"{what} is too short", why=why, hint="--secret with a file that is not there makes one"
        )
    return text


def client_context(trust: Trust) -> ssl.SSLContext | None:
    """TLS as a node speaks it: with the user's certificates both sides show theirs. None without a secret."""
    if not trust.secret:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the proof is bound to the certificate, whatever name it has
    context.verify_mode = ssl.CERT_NONE
    if trust.certificates is not None:
        _load(context, trust.certificates)
    return context


def server_context(trust: Trust) -> tuple[ssl.SSLContext | None, bytes]:
    """TLS as the scheduler speaks it, and its certificate as DER. None and nothing without a secret."""
    if not trust.secret:
        return None, b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if trust.certificates is not None:
        _load(context, trust.certificates)
        return context, _der(trust.certificates / "cert.pem")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as made:
        folder = Path(made)
        key, certificate = folder / "key.pem", folder / "cert.pem"
        openssl = shutil.which("openssl")
        if openssl is None:
            raise LaunchError(
                "no certificate can be made for the job",
                why="the command openssl is not on PATH",
                hint=f"install it, or --certificates FOLDER with {', '.join(FILES)}",
            )
        command = [openssl, *OPENSSL.split(), "-keyout", str(key), "-out", str(certificate)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise LaunchError("openssl made no certificate", why=done.stderr.strip()[-500:])
        context.load_cert_chain(certificate, key)
        return context, _der(certificate)


def _load(context: ssl.SSLContext, folder: Path) -> None:
    try:
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except OSError as error:  # of ssl, too
        missing = [name for name in FILES if not (folder / name).exists()]
        why = f"{', '.join(missing)} is not there" if missing else str(error)
        hint = "ca.pem: the authority; cert.pem and key.pem: of this machine, signed by it"
        raise LaunchError(f"--certificates {folder} cannot be used", why=why, hint=hint) from None
    context.verify_mode = ssl.CERT_REQUIRED


def _der(path: Path) -> bytes:
    first, end, _ = path.read_text().partition("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN CERTIFICATE-----") :] + end)


__all__ = ["Trust", "client_context", "find_secret", "nonce", "proof", "same", "server_context"]
