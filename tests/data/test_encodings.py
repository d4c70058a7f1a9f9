import pytest

from memlm.data.corpus import Corpus, Problem
from memlm.data.extract.encodings import decode
from memlm.data.extract.outcome import Unreadable

GERMAN = "Das Gateway des Büros hört auf Port 7443, und sonst nichts. Öl und Übung für Fräulein Müller."
FRENCH = (
    "La passerelle du bureau écoute. Chaque nuit, le serveur sauvegarde tous les documents déjà créés, l’été aussi."
)
RUSSIAN = "Шлюз офиса слушает порт 7443. Он пересылает запросы в реестр, и больше ничего не делает."
CZECH = "Brána kanceláře naslouchá na portu 7443. Předává požadavky do registru a nic víc."


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "utf-8"),
        (GERMAN, "cp1252"),
        (GERMAN, "latin-1"),
        (FRENCH, "cp1252"),
        ("¿Dónde está la niña? ¡Aquí! El año 1º, según él.", "latin-1"),
        ("Não há mais informações sobre o servidor; as alterações são gravadas todas as noites.", "latin-1"),
        ("Blåbærsyltetøy på brødet, og én øl. Året rundt – 5 € – “godt”.", "cp1252"),
        ("plain ASCII", "ascii"),
        *((text, f"utf-16-{order}") for text in (GERMAN, RUSSIAN, "short text") for order in ("le", "be")),
    ],
)
def test_a_text_is_read_in_the_encoding_that_it_can_only_be_in(text, encoding):
    assert decode(text.encode(encoding)) == text


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        (CZECH, "cp1250"),
        (CZECH, "iso8859-2"),
        ("Brama biura nasłuchuje na porcie 7443. Przekazuje żądania, także zdjęć.", "cp1250"),
        ("Ofisin ağ geçidi 7443 numaralı bağlantı noktasını dinler.", "cp1254"),
        ("Minden éjjel biztonsági másolatot őriz, űrlap.", "cp1250"),
        ("事務所のゲートウェイはポート7443で待ち受けます。", "cp932"),
        ("办公室的网关监听端口7443。它将请求转发到注册表。", "gb18030"),
        (GERMAN, "mac_roman"),
        (GERMAN, "cp437"),
        (GERMAN, "cp500"),
        ("nur \xff", "latin-1"),
    ],
)
def test_an_encoding_that_is_not_known_for_sure_is_refused(text, encoding):
    with pytest.raises(Unreadable, match=r"not UTF-8 \(byte 0x..\); convert the file to UTF-8 text \(iconv"):
        decode(text.encode(encoding))


@pytest.mark.parametrize(
    "data",
    [b"fine\n\0", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9, bytes(range(256)) * 4, b"a\0b\0" * 20 + b"\0\xd8", b"\0" * 100],
)
def test_bytes_with_zeros_that_are_no_utf_16_are_binary(data):
    with pytest.raises(Unreadable, match="a NUL byte, as in binary files"):
        decode(data)


def test_files_in_other_encodings_are_read_and_what_is_not_known_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(GERMAN.encode("cp1252"))
    (tmp_path / "b.txt").write_bytes((FRENCH * 200).encode("utf-16-le"))
    (tmp_path / "c.txt").write_bytes(b"ok\n" + RUSSIAN.encode("cp1251"))
    problems = list[Problem]()
    texts = [document.text for document in Corpus([tmp_path], on_problem=problems.append)]
    assert texts == [GERMAN, FRENCH * 200]
    assert [problem.where for problem in problems] == ["c.txt:2"]
    assert problems[0].reason == "not UTF-8"
