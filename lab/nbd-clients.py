# nbd-clients.py SOCKET DIR - tests a Freestone server with libnbd's Python binding (see run-nbd.sh): every kind of negotiation, every
# command and flag, 64-bit lengths, several contexts. DIR has the files that the server serves. Ends at the first failure.
import errno, random, sys
import nbd

SOCKET, DIR = sys.argv[1], sys.argv[2]
GIB, TIB = 1 << 30, 1 << 40
VAST = 8 * TIB  # the disk r
BOTH = ["base:allocation", "freestone:changed"]


def connect(export, extended, structured, contexts=()):
    h = nbd.NBD()
    h.set_request_extended_headers(extended)
    h.set_request_structured_replies(structured)
    for context in contexts:
        h.add_meta_context(context)
    h.connect_uri("nbd+unix:///%s?socket=%s" % (export, SOCKET))
    chunks = extended and structured  # libnbd requests extended headers only together with structured replies
    assert h.get_extended_headers_negotiated() == chunks
    assert h.get_structured_replies_negotiated() == structured
    return h


def fails(what, number, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except nbd.Error as error:
        assert error.errnum == number, "%s: %s" % (what, error)
        return
    raise AssertionError(what + " did not fail")


def status(call, *args):
    found = {}

    def rows(context, offset, extents, error):
        assert error.value == 0
        found[context] = [(e[0], e[1]) if isinstance(e, tuple) else e for e in extents]

    call(*args, rows)
    return found


def commands(extended, structured):
    with_contexts = ["base:allocation"] if structured else []
    h = connect("r", extended, structured, with_contexts)
    wide = extended and structured
    assert h.can_df() == structured and h.can_block_status_payload() == wide
    assert all([h.can_trim(), h.can_zero(), h.can_fast_zero(), h.can_fua(), h.can_flush(), h.can_cache()])
    rng = random.Random(7)
    for size in [1, 511, 512, 4096, 100_000, 1 << 20, (32 << 20) + 5]:
        data, at = rng.randbytes(size), rng.randrange(GIB)
        h.pwrite(data, at, nbd.CMD_FLAG_FUA)
        assert h.pread(size, at) == data
        assert h.pread(size, VAST - size) == bytes(size)
    h.zero(64 << 20, 0)
    h.pwrite(b"x" * 4096, 1 << 20)
    if structured:
        pieces = []
        h.pread_structured(2 << 20, 0, lambda data, offset, kind, error: pieces.append((offset, len(data), kind, set(data))))
        assert sum(piece[1] for piece in pieces) == 2 << 20
        assert {piece[2] for piece in pieces} == {nbd.READ_DATA, nbd.READ_HOLE}, pieces
        assert all(piece[3] == {0} for piece in pieces if piece[2] == nbd.READ_HOLE)
        whole = []
        h.pread_structured(2 << 20, 0, lambda data, offset, kind, error: whole.append(kind), nbd.CMD_FLAG_DF)
        assert whole == [nbd.READ_DATA]
        h.pread_structured(1 << 20, 0, lambda data, offset, kind, error: whole.append(kind), nbd.CMD_FLAG_DF)
        assert whole[1:] == [nbd.READ_HOLE]
    h.trim(4096, 1 << 20)
    assert h.pread(4096, 1 << 20) == bytes(4096)
    h.cache(1 << 20, 0)
    h.zero(1 << 20, 0, nbd.CMD_FLAG_NO_HOLE)
    h.zero(1 << 20, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
    h.flush()
    # Invalid ranges and flags. Strict mode is off, so that the server and not libnbd refuses them.
    h.set_strict_mode(0)
    fails("a read beyond the end", errno.EINVAL, h.pread, 512, VAST)
    fails("zeroes beyond the end", errno.ENOSPC, h.zero, 512, VAST)
    fails("fast zeroes without holes", errno.ENOTSUP, h.zero, 512, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
    fails("a flag of another command", errno.EINVAL, h.trim, 512, 0, nbd.CMD_FLAG_REQ_ONE)
    fails("a read of nothing", errno.EINVAL, h.pread, 0, 0)
    h.set_strict_mode(nbd.STRICT_MASK)

    # The whole disk in one request, or as much as a 32-bit length allows.
    before = h.stats_chunks_sent()
    if wide:
        h.pwrite(b"y" * 4096, 5 * TIB)
        for call in [h.zero, h.trim]:
            call(VAST, 0)
        h.cache(VAST, 0)
        assert h.stats_chunks_sent() - before == 4
        found = status(h.block_status_64, VAST, 0)
        assert found == {"base:allocation": [(VAST, 3)]}, found
        h.pwrite(b"z" * 4096, 6 * TIB)
        found = status(h.block_status_64, VAST - 4096, 4096)
        assert found == {"base:allocation": [(6 * TIB - 4096, 3), (4096, 0), (2 * TIB - 4096, 3)]}, found
        h.zero(VAST - 1000, 999)
        assert h.pread(4096, 6 * TIB) == bytes(4096)
    else:
        fails("64 bits in 32", errno.ERANGE, h.zero, VAST, 0)
        most = 4 * GIB - 512
        h.zero(most, 0)
        if structured:
            found = status(h.block_status_64, most, 0)
            assert found == {"base:allocation": [(most, 3)]}, found

    # Many requests in flight, one of which takes long.
    cookies = [h.aio_zero(VAST if wide else 4 * GIB - 512, 0)]
    buffers = [nbd.Buffer(64 << 10) for _ in range(32)]
    cookies += [h.aio_pread(buffer, 7 * TIB + n * (64 << 10)) for n, buffer in enumerate(buffers)]
    while cookies:
        h.poll(10_000)
        cookies = [cookie for cookie in cookies if not h.aio_command_completed(cookie)]
    assert all(buffer.to_bytearray() == bytes(64 << 10) for buffer in buffers)
    h.shutdown()
    print("ok   extended %s, structured %s" % (extended, structured))


def contexts():
    f = connect("f", True, True, BOTH)
    # A fork of 6 TiB with 1 MiB of the base at 1 TiB and 4 KiB written at 0.
    f.pwrite(b"w" * 4096, 0)
    size = f.get_size()
    found = status(f.block_status_64, size, 0)
    allocation = [(4096, 0), (TIB - 4096, 3), (1 << 20, 0), (size - TIB - (1 << 20), 3)]
    changed = [(4096, 1), (size - 4096, 0)]
    assert found == dict(zip(BOTH, [allocation, changed])), found
    assert status(f.block_status_filter, size, 0, BOTH) == found
    for name, rows in zip(BOTH, [allocation, changed]):
        assert status(f.block_status_filter, size, 0, [name]) == {name: rows}
        if f.can_block_status_payload():
            rows = [(min(rows[0][0], TIB), rows[0][1])]
            only = {}
            f.block_status_filter(TIB, 0, [name], lambda context, at, extents, error: only.update({context: extents}), nbd.CMD_FLAG_REQ_ONE)
            assert only == {name: rows}, only
    f.shutdown()

    # The same without extended headers, with 32-bit lengths.
    f = connect("f", False, True, BOTH)
    found = status(f.block_status_64, 2 * GIB, 0)
    assert found == dict(zip(BOTH, [[(4096, 0), (2 * GIB - 4096, 3)], [(4096, 1), (2 * GIB - 4096, 0)]])), found
    fails("no payload is offered", errno.ENOTSUP, f.block_status_filter, 4096, 0, BOTH, lambda *_: 0)
    f.shutdown()
    print("ok   two contexts, together and separately")


def options():
    h = nbd.NBD()
    h.set_opt_mode(True)
    h.set_request_extended_headers(False)
    h.set_request_structured_replies(False)
    h.connect_unix(SOCKET)
    h.set_export_name("f")
    assert not h.get_structured_replies_negotiated()
    fails("contexts before chunks", errno.ENOTSUP, h.opt_set_meta_context_queries, BOTH, lambda *_: 0)
    assert h.opt_structured_reply() and h.opt_extended_headers()
    assert h.opt_set_meta_context_queries(BOTH, lambda *_: 0) == 2
    listed = []
    assert h.opt_list_meta_context_queries([], lambda name: listed.append(name)) == 2 and sorted(listed) == BOTH
    h.set_request_meta_context(False)
    h.opt_info()
    assert h.can_block_status_payload() and h.can_df()
    h.opt_go()
    assert h.get_extended_headers_negotiated() and all(map(h.can_meta_context, BOTH))
    assert h.pread(4096, TIB) == b"b" * 4096
    h.shutdown()
    print("ok   option by option")


for extended in [True, False]:
    for structured in [True, False]:
        commands(extended, structured)
contexts()
options()
