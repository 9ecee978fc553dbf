#!/usr/bin/env python3
# zonefs_super.py FILE - writes the super block of zonefs, which is in the first zone, because Debian 12 has no mkzonefs. Every zone is a
# file that root may write.
import struct
import sys
import uuid
import zlib

MAGIC = 0x5A4F4653
FEATURES = 0
UID = GID = 0
PERMISSIONS = 0o640


def block(checksum):
    head = struct.pack("<II64s16sQIII", MAGIC, checksum, b"lab", uuid.UUID(int=1).bytes, FEATURES, UID, GID, PERMISSIONS)
    return head.ljust(4096, b"\0")


# The kernel's CRC is not inverted at the end.
with open(sys.argv[1], "wb") as file:
    file.write(block(zlib.crc32(block(0)) ^ 0xFFFFFFFF))
