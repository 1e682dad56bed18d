"""A greeted connection, from both sides, for who may wait: TLS, then each side proves that it knows the secret."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from meshwright.errors import LaunchError
from meshwright.scheduler import messages as m
from meshwright.scheduler.trust import Trust, client_context, nonce, proof, same

CONNECT_SECONDS = 10.0
SCHEDULER, PARAMETER_SERVER = "scheduler", "parameter server"  # a proof of one is none of the other
CALLER = "node"
NO_TLS = (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
)  # what openssl calls other protocols


def call(
    host: str, port: int, trust: Trust, role: str, reach_seconds: float = CONNECT_SECONDS
) -> socket.socket:
    """A connection to who has this role there, greeted, with a time-out of `CONNECT_SECONDS`; `reach_seconds`: until
    its machine answers. Raises OSError for one that is not there, LaunchError for one that does not know the secret."""
    plain = socket.create_connection((host, port), reach_seconds)
    plain.settimeout(CONNECT_SECONDS)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    context, called = client_context(trust), f"the {role} at {at(host, port)}"
    made: socket.socket = plain
    try:
        certificate = b""
        if context is not None:
            made = secured = context.wrap_socket(plain)
            certificate = secured.getpeercert(binary_form=True) or b""
        _greet(made, trust.secret, certificate, role, called)
    except ssl.SSLCertVerificationError as error:
        made.close()
        raise _untrusted(called, f"its certificate: {error.verify_message}") from None
    except ssl.SSLError as error:
        made.close()
        if error.reason in NO_TLS:
            raise LaunchError(
                f"what listens at {at(host, port)} is not the {role}",
                why=f"it does not speak TLS ({error.reason})",
                hint="another port in --master (MS_SCHED_PORT, MASTER_PORT), or end what listens there",
            ) from None
        raise _untrusted(called, f"TLS: {error.reason or error}") from None
    except BaseException:
        made.close()
        raise
    return made


def _greet(made: socket.socket, secret: str, certificate: bytes, role: str, called: str) -> None:
    mine = nonce()
    send(made, m.Hello(m.VERSION, mine))
    answer = receive(made, m.Challenge | m.Refused, m.GREETING_BYTES)
    if isinstance(answer, m.Refused):
        raise answer.error()
    both = (mine, answer.nonce, certificate)
    if not same(answer.proof, proof(secret, role, *both)):
        raise _untrusted(called, "it does not know the secret of this job, or somebody sits in between")
    send(made, m.Prove(proof(secret, CALLER, *both)))
    receive(made, m.Welcome, m.GREETING_BYTES)


def _untrusted(called: str, why: str) -> LaunchError:
    hint = "the same --secret on all nodes (MESHWRIGHT_SECRET), and the same --certificates"
    return LaunchError(f"{called} is not trusted", why=why, hint=hint)


def challenged(hello: m.Hello, secret: str, certificate: bytes, role: str) -> tuple[m.Challenge, m.Prove]:
    """What is answered to a greeting, and the proof that has to follow. Raises Malformed for another version."""
    mine = nonce()
    if hello.version != m.VERSION or len(hello.nonce) != len(mine):
        raise m.Malformed(f"the {role} is of another version of Meshwright")
    both = (hello.nonce, mine, certificate)
    return m.Challenge(mine, proof(secret, role, *both)), m.Prove(proof(secret, CALLER, *both))


def admit(
    plain: socket.socket, context: ssl.SSLContext | None, certificate: bytes, secret: str, role: str
) -> socket.socket:
    """The connection of somebody who knows the secret, without a time-out. Raises OSError, EOFError, Malformed."""
    plain.settimeout(CONNECT_SECONDS)
    made = plain if context is None else context.wrap_socket(plain, server_side=True)
    try:
        hello = receive(made, m.Hello, m.GREETING_BYTES)
        try:
            challenge, expected = challenged(hello, secret, certificate, role)
        except m.Malformed as error:
            send(made, m.Refused(str(error)))
            raise
        send(made, challenge)
        if not same(receive(made, m.Prove, m.GREETING_BYTES).proof, expected.proof):
            raise m.Malformed("no proof of the secret")
        send(made, m.Welcome())
        made.settimeout(None)
    except BaseException:
        made.close()
        raise
    return made


def at(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def send(made: socket.socket, message: m.Message) -> None:
    made.sendall(m.frame(message))


def receive(made: socket.socket, kind: Any, limit: int = m.FRAME_BYTES) -> Any:
    """The next message. Raises EOFError at the end, Malformed for anything else than `kind`."""
    return m.decode(_exactly(made, m.length(_exactly(made, m.LENGTH.size), limit)), kind)


def _exactly(made: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = made.recv(min(count - len(data), 1 << 20))
        if not more:
            raise EOFError("the connection has ended")
        data += more
    return bytes(data)


__all__ = ["PARAMETER_SERVER", "SCHEDULER", "admit", "at", "call", "challenged", "receive", "send"]
