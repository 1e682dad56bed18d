"""Strangers at the scheduler's port: they read nothing, stop nothing, and start nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.scheduler import messages as m
from meshwright.scheduler import server as server_module
from meshwright.scheduler.client import Client, Place, connect
from meshwright.scheduler.link import receive, send
from meshwright.scheduler.trust import Trust, client_context, find_secret, proof, server_context
from tests.scheduler.serving import SECRET, serving


def plain(place: Place) -> socket.socket:
    made = socket.create_connection((place.host, place.port), 10)
    made.settimeout(20)
    return made


def over_tls(place: Place) -> socket.socket:
    context = client_context(place.trust)
    assert context is not None
    return context.wrap_socket(plain(place))


def ended(made: socket.socket) -> bool:
    """Whether the other side says nothing more and closes."""
    with contextlib.suppress(OSError), made:
        return made.recv(1) == b""
    return True


GARBAGE = {
    "half a TLS greeting": (plain, b"\x16\x03\x01\x02\x00\x01"),
    "plain text": (plain, b"GET / HTTP/1.1\r\n\r\n"),
    "a message without TLS": (plain, m.frame(m.Hello(m.VERSION, bytes(32)))),
    "garbage": (over_tls, m.LENGTH.pack(9) + b"\xc1garbage!"),
    "too large a message": (over_tls, m.LENGTH.pack(m.GREETING_BYTES + 1)),
    "a request before the proof": (over_tls, m.frame(m.Ask("s", 1, m.Get("0/key")))),
    "another version": (over_tls, m.frame(m.Hello(m.VERSION + 1, bytes(32)))),
    "a short nonce": (over_tls, m.frame(m.Hello(m.VERSION, b"0"))),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_greeting_ends_the_connection(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how, sent = GARBAGE[what]
    monkeypatch.setattr(server_module, "GREETING_SECONDS", 0.5)  # so long for half a message
    with serving() as (place, _):
        member = Client(place)
        member.set("0/key", b"value")
        stranger = how(place)
        stranger.sendall(sent)
        if "version" in what or "nonce" in what:
            assert isinstance(receive(stranger, m.Refused), m.Refused)
        assert ended(stranger)
        assert member.get("0/key", 0.0) == b"value"
        member.close()


def test_a_wrong_secret_is_told_nothing_and_a_proof_is_of_use_once() -> None:
    with serving() as (place, _):
        wrong = Place(place.host, place.port, Trust("another secret, long enough"))
        with pytest.raises(LaunchError, match="does not know the secret"):
            connect(wrong)
        with over_tls(place) as member:  # and its words, for the stranger to repeat
            hello = m.Hello(m.VERSION, bytes(32))
            send(member, hello)
            challenge = receive(member, m.Challenge)
            certificate = member.getpeercert(binary_form=True)
            prove = m.Prove(proof(SECRET, "node", hello.nonce, challenge.nonce, certificate))
            send(member, prove)
            receive(member, m.Welcome)
        stranger = over_tls(place)
        send(stranger, hello)
        receive(stranger, m.Challenge)
        send(stranger, prove)
        assert ended(stranger)
        mirror = over_tls(place)  # sends the scheduler's own proof back
        send(mirror, hello)
        send(mirror, m.Prove(receive(mirror, m.Challenge).proof))
        assert ended(mirror)


def test_who_has_no_secret_is_told_that_the_job_may_have_one() -> None:
    with serving() as (place, _):
        client = Client(Place(place.host, place.port, Trust()), patience=0.0)
        with pytest.raises(LaunchError, match="--secret with that file, and not --insecure"):
            client.get("0/key", 0.0)


def test_who_sits_in_between_is_found_out() -> None:
    """It passes on every word, and has a certificate of its own."""
    with serving() as (place, _), socket.create_server(("127.0.0.1", 0)) as listening:
        context, _certificate = server_context(Trust("the secret of the one in between"))
        assert context is not None

        def relay() -> None:
            with contextlib.suppress(OSError, EOFError):
                with (
                    context.wrap_socket(listening.accept()[0], server_side=True) as here,
                    over_tls(place) as there,
                ):
                    send(there, receive(here, m.Hello))
                    send(here, receive(there, m.Challenge))
                    send(there, receive(here, m.Prove))

        between = threading.Thread(target=relay)
        between.start()
        with pytest.raises(LaunchError, match="somebody sits in between"):
            connect(Place("127.0.0.1", listening.getsockname()[1], place.trust))
        between.join(20)


def test_another_service_is_not_taken_for_a_scheduler_with_another_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            made, _ = listening.accept()
            with made:
                made.recv(1000)
                made.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        place = Place("127.0.0.1", listening.getsockname()[1], Trust(SECRET))
        with pytest.raises(LaunchError, match="is not the scheduler") as found:
            connect(place).close()
        answering.join()
    assert "does not speak TLS" in found.value.why and "MASTER_PORT" in found.value.hint


def test_strangers_that_wait_make_room_for_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STRANGERS", 4)
    with serving() as (place, _):
        strangers = [over_tls(place) for _ in range(12)]
        member = Client(place)
        member.set("0/key", b"value")
        member.close()
        for stranger in strangers:
            stranger.close()


def test_a_member_that_sends_garbage_is_put_out_alone() -> None:
    with serving() as (place, _):
        bad, good = connect(place), Client(place)
        bad.sendall(m.LENGTH.pack(5) + b"\x93\xc0\xc0\xc0\xc0")
        assert ended(bad)
        good.set("0/key", b"value")
        good.close()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_who_is_refused_does_not_take_out_the_node_of_that_name(host: str) -> None:
    """Neither with its Leave nor when its connection closes; so, too, while an attempt runs."""

    def join(id: str, host: str) -> m.Join:
        return m.Join(m.Node(id, host, 1), 2, 0, 0, time.time(), 0.1)

    def refused(place: Place) -> None:
        other = Client(place)
        with pytest.raises(LaunchError, match="the node id a is taken"):
            other.ask(join("a", host), m.Formed | m.Waiting)
        other.ask(m.Leave("a"), m.Done)
        other.close()

    with serving() as (place, server):
        one, two, follows = Client(place), Client(place), Client(place)
        one.ask(join("a", "here"), m.Waiting)
        refused(place)
        assert [node.id for node in two.ask(join("b", "there"), m.Formed | m.Waiting).nodes] == ["a", "b"]
        refused(place)
        seen = follows.ask(m.Watch("a", 1, -1, 0.0), m.State)
        assert (seen.silent, seen.over, server.members.facts.lost) == ((), False, ())
        refused(place)
        one.ask(m.Leave("a"), m.Done)
        assert server.members.facts.lost == ("a",)
        again = Client(place)  # from wherever: nobody is this node now
        assert again.ask(join("a", "here"), m.Waiting).absent == ("b (there)",)
        for client in (one, two, follows, again):
            client.close()


def test_certificates_of_a_folder_are_asked_of_both_sides(tmp_path: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *key, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem", "-days", "9"
    )
    openssl("req", *key, "-subj", "/CN=node", "-keyout", "key.pem", "-out", "node.csr")
    openssl(
        "x509",
        "-req",
        "-in",
        "node.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "cert.pem",
    )
    with serving(certificates=tmp_path) as (place, _):
        member = Client(place)
        member.set("0/key", b"value")
        member.close()
        without = Place(place.host, place.port, Trust(SECRET))
        with pytest.raises((LaunchError, ssl.SSLError, OSError, EOFError)):
            connect(without)
    (tmp_path / "key.pem").unlink()
    with pytest.raises(LaunchError, match=r"key\.pem is not there"):
        client_context(Trust(SECRET, tmp_path))


def test_a_secret_is_made_for_its_user_and_refused_when_others_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MESHWRIGHT_SECRET", "MESHWRIGHT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "job.key"
    with pytest.raises(LaunchError, match="cannot read the secret"):
        find_secret(path, make=False)
    made = find_secret(path, make=True)
    assert len(made) >= 40
    assert find_secret(path, make=False) == made
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"others on this machine can read it[\s\S]*chmod 600"):
        find_secret(path, make=False)
    monkeypatch.setenv("MESHWRIGHT_SECRET", "short")
    with pytest.raises(LaunchError, match="MESHWRIGHT_SECRET is too short"):
        find_secret(None, make=False)
