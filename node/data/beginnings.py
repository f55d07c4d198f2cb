"""What is no text, known by how it begins: its name for people, and what makes text of it.

The beginnings are those that the formats' own specifications give, or file(1)'s collection of them. Where one is of
letters alone, with which a text may begin, too, a NUL must follow somewhere.
"""

from __future__ import annotations

import codecs
import re

from node.machine.kinds import Kind
from node.machine.pointers import POINTERS

_MARKUP = re.compile(
    rb"(?:\xef\xbb\xbf)?\s{0,256}(?:<!--.{0,4096}?-->\s{0,256})?"
    rb"(?:<!doctype html|<html|(?P<xml><\?xml|<!doctype|<svg|<rss))",
    re.DOTALL | re.IGNORECASE,
)
_LOOKED_AT = 4_096  # bytes that are taken back from Latin-1
_NUL = rb"(?=[^\0]*\0)"
_ZIP = rb"PK\x03\x04.{26}"  # and the name of the first file in it
_OFFICE = _ZIP + rb"(?:\[Content_Types\]\.xml|_rels/|docProps/)"

_LEAVE = "Leave it out."
_SAVE = "Save it as plain text in UTF-8, a table as CSV, with the program that it belongs to, or with LibreOffice."
_ROWS = "Write the texts in it as JSON lines with the program that made it."
_NUMBERS = "Name the texts that it was made of."
_PANDOC = "Make text of it: pandoc -f {form} -t plain {{file}} -o {{text}}."


KINDS = (
    # what stands for a text
    *POINTERS,
    Kind(
        "an encrypted file",
        rb"-----BEGIN (?:PGP MESSAGE|AGE ENCRYPTED)|age-encryption\.org/v|\$ANSIBLE_VAULT;|\0GITCRYPT\0|Salted__"
        rb"|LUKS\xba|\x85[\x01-\x04].\x03|\x84.\x03|[\x8c\xc3]\x0d\x04",
        "Decrypt it, and name what comes out.",
    ),
    Kind(
        "a key or a certificate",
        rb"-----BEGIN (?:[A-Z0-9]+ ){0,4}(?:CERTIFICATE|KEY|BLOCK|CRL|REQUEST|PARAMETERS|PKCS7|CMS)-----"
        rb"|---- BEGIN SSH2 |PuTTY-User-Key-File-\d|(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-[\w-]{1,20}) AAAA"
        rb"|AGE-SECRET-KEY-1|Bag Attributes\r?\n|Certificate:\r?\n\s+Data:\r?\n",
        _LEAVE,
    ),
    Kind(
        "a file written as letters (uuencode, yEnc, BinHex)",
        rb"begin(?:-base64)? [0-7]{3} [^\n]{1,200}\n"
        rb"(?:M[ -`]{60}|[!-L][ -`]{1,60}\r?\n[ `]?\r?\nend|[A-Za-z0-9+/]{40,76}=*\r?\n)"
        rb"|=ybegin (?:part|line)=|\(This file must be converted with BinHex",
        "Decode it, and name what comes out.",
    ),
    # documents
    Kind("a PDF document", rb"(?:\xef\xbb\xbf)?\s{0,16}%PDF-", "Make text of it: pdftotext {file} {text}."),
    Kind("a PostScript document", rb"%!PS|\xc5\xd0\xd3\xc6", "Make text of it: ps2ascii {file} {text}."),
    Kind(
        "a rich text document (RTF)",
        rb"\{\\rtf\d?\s{0,4}\\[a-z]",
        _PANDOC.format(form="rtf"),
    ),
    Kind(  # as JSON; one a line, as in a data set of them, are rows
        "a Jupyter notebook",
        rb"\{(?:\s*\n\s*\"(?:cells|metadata|worksheets)\"|\s*\"nbformat\")\s*:(?=.*\"(?:cell_type|nbformat(?:_minor)?)\")",
        "Make text of it: jupyter nbconvert --to markdown {file}.",
    ),
    Kind("a DjVu document", rb"AT&TFORM", "Make text of it: djvutxt {file} {text}."),
    Kind("a Word document", _OFFICE + rb".*word/", _PANDOC.format(form="docx")),
    Kind("an Office document", _OFFICE, _SAVE),
    Kind(
        "an OpenDocument text",
        _ZIP + rb"mimetypeapplication/vnd\.oasis\.opendocument\.text",
        _PANDOC.format(form="odt"),
    ),
    Kind("an OpenDocument file", _ZIP + rb"mimetypeapplication/vnd\.", _SAVE),
    Kind("an EPUB book", _ZIP + rb"mimetypeapplication/epub", _PANDOC.format(form="epub")),
    Kind("a MOBI book", rb".{60}BOOKMOBI", "Make text of it: ebook-convert {file} {text}."),
    Kind("an old Office file (doc, xls, ppt, msg)", rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _SAVE),
    # pictures, sound, films
    Kind(
        "a picture",
        rb"\xff\xd8\xff|\x89PNG|GIF8[79]a.[\0-\x1f].[\0-\x1f]|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]|BM.{4}\0{4}"
        rb"|\0\0[\x01\x02]\0[^\0]\0|\0\0[\0-\x0f].ftyp(?:hei|hev|mif1|msf1|avi)|\0\0\0\x0c(?:jP  |JXL )|8BPS\0"
        rb"|gimp xcf |v/1\x01|\xff\x0a" + _NUL,
        _LEAVE,
    ),
    Kind(
        "a sound or video file",
        rb"ID3[\x02-\x04]|fLaC\0|OggS\0|MThd\0|caff\0|\.snd\0|\0\0[\0-\x0f].(?:ftyp|moov|mdat|wide|free)"
        rb"|\x1aE\xdf\xa3|FLV\x01|\0\0\x01[\xb3\xba]|0&\xb2u\x8ef\xcf\x11"
        rb"|(?:\xff[\xf1-\xf3\xf9-\xfb\xe2\xe3]|FORM.{4}AIF|RIFF.{4}(?:WAVE|AVI )|#!AMR)" + _NUL,
        "Leave it out, or write down what is said in it.",
    ),
    Kind("a font", rb"\0\x01\0\0\0|OTTO\0|ttcf\0|wOF[F2]" + _NUL, _LEAVE),
    # arrays, models, databases
    Kind("a NumPy file", rb"\x93NUMPY|" + _ZIP + rb"[^/\0]{1,255}?\.npy", _NUMBERS),
    Kind("a model's weights (torch)", _ZIP + rb"[^/\0]{1,255}/(?:data\.pkl|\.format_version)", _NUMBERS),
    Kind("a pickle", rb"\x80[\x02-\x05]|\([dl]p[01]\n|ccopy_reg\n|c__builtin__\n", _ROWS),
    Kind(
        "a model's weights (safetensors, GGUF)",
        rb".{3}[\0-\x05]\0{4}\{\s{0,8}\"|GGUF[\x01-\x09]\0|(?:lmgg|tjgg|fmgg)" + _NUL,
        _NUMBERS,
    ),
    Kind("a file of tokens (Megatron)", rb"MMIDIDX\0|TNTIDX\0", _NUMBERS),
    Kind(
        "an SQLite database",
        rb"SQLite format 3\0",
        "Write its texts as CSV: sqlite3 -csv -header {file} 'select COLUMN as text from TABLE' > {csv}.",
    ),
    Kind(
        "a database",
        rb".{16}(?:\xde\xc0\xef\xbe|\xbe\xef\xc0\xde)|.{8}DUCK(?=.*\0)|REDIS0\d{3}|\0\x01\0\0Standard "
        rb"|\xce\x9aW[\x13\x18]",
        _ROWS,
    ),
    Kind(
        "a file of columns or records (HDF5, ORC, Avro, Feather, TFRecord)",
        rb"\x89HDF|(?:ORC|FEA1|PARE)" + _NUL + rb"|Obj\x01|RCF\x01|SEQ[\x04-\x06]"
        rb"|.{3}\0{5}.{4}\x0a.{1,3}\x0a",
        _ROWS.replace("JSON lines", "parquet or JSON lines"),
    ),
    Kind(
        "a file of a statistics program",
        rb"RD[XA][23]\n|X\n\0\0\0|<stata_dta>|\$FL[23]@|MATLAB 5\.0 MAT|\0{12}\xc2\xea\x81",
        "Write the texts in it as CSV with that program.",
    ),
    Kind("a property list (macOS)", rb"bplist0\d|\0\0\0\x01Bud1", _LEAVE),
    # archives
    Kind("a Java archive", _ZIP + rb"META-INF/|\xca\xfe\xd0\x0d", _LEAVE),
    Kind(
        "a zip archive",
        rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
        "Unpack it and name the files in it: unzip {file} -d {folder}.",
    ),
    Kind(
        "a tar archive",
        rb".{257}ustar[\0 ]",
        "Unpack it and name the files in it: mkdir {folder} && tar -xf {file} -C {folder}.",
    ),
    Kind(
        "a packed file",
        rb"7z\xbc\xaf|Rar!\x1a\x07|MSCF\0|xar!\0|!<arch>\n|\xed\xab\xee\xdb|07070[127][0-9A-Fa-f]{70}"
        rb"|(?:`\xea|\xc7q|hsqs)" + _NUL,
        "Unpack it and name the files in it: 7z x {file} -o{folder}.",
    ),
    Kind("compressed with lz4", rb"[\x04]\"M\x18|\x02!L\x18", "Decompress it: lz4 -dc {file} > {plain}."),
    Kind("compressed with lzip", rb"LZIP[\0\x01]", "Decompress it: lzip -dc {file} > {plain}."),
    Kind(
        "compressed with lzma", rb"\x5d\0\0[\0-\x80]", "Decompress it: xz --format=lzma -dc {file} > {plain}."
    ),
    Kind("compressed with compress", rb"\x1f\x9d", "Decompress it: gzip -dc < {file} > {plain}."),
    Kind("compressed with lzop", rb"\x89LZO\0", "Decompress it: lzop -dc {file} > {plain}."),
    Kind("compressed with snappy", rb"\xff\x06\0\0sNaPpY", "Decompress it first."),
    # programs
    Kind(
        "a program",
        rb"\x7fELF|MZ"
        + _NUL
        + rb"|\xfe\xed\xfa[\xce\xcf]|[\xce\xcf]\xfa\xed\xfe|\xca\xfe\xba\xbe|\0asm|dex\n03"
        rb"|BC\xc0\xde|\x1bLua|..\r\n[\0-\x03]\0\0\0",
        _LEAVE,
    ),
)
_ANY = re.compile(
    b"|".join(b"(?P<k%d>%s)" % (number, kind.pattern) for number, kind in enumerate(KINDS)), re.DOTALL
)


def kind_of(head: bytes) -> Kind[bytes] | None:
    """The kind of a file that begins so; also after its bytes were taken for Latin-1 and written as UTF-8."""
    found = _ANY.match(head)
    if found is None and not head[:_LOOKED_AT].isascii():
        found = _ANY.match(_from_latin_1(head[:_LOOKED_AT]))
    return KINDS[int((found.lastgroup or "k0")[1:])] if found else None


def markup_in(head: bytes) -> str:
    """The markup that a text begins with where it is a page or a tree, not written to be read; empty for none."""
    found = _MARKUP.match(head)
    return "" if found is None else "XML" if found["xml"] else "a web page (HTML)"


def _from_latin_1(head: bytes) -> bytes:
    """The bytes before `iconv -f LATIN1 -t UTF-8`; none where it cannot have been."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(head).encode("latin-1")
    except UnicodeError:
        return b""
