"""A passage in any language is found by its words, and by other forms of them where the language has simple endings."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlm.base import phrases
from memlm.base.phrases import forms_of, terms_of, words_of

# A sentence, and a word of it.
SENTENCES = {
    "English": ("The gateway of the office listens on port 7443.", "Gateway"),
    "German": ("Die Straße über den Fluss ist seit gestern gesperrt.", "STRASSE"),
    "French": ("L’été dernier, nous avons fermé l’école.", "école"),
    "Spanish": ("El niño compró una bicicleta en la tienda.", "NIÑO"),
    "Italian": ("La città è più bella di notte.", "Città"),
    "Portuguese": ("A estação de comboios fica em São Bento.", "ESTAÇÃO"),
    "Polish": ("Łódź leży w środku kraju.", "łódź"),
    "Turkish": ("İstanbul'da yağmur yağıyor.", "istanbul"),
    "Vietnamese": ("Thủ đô của Việt Nam là Hà Nội.", "VIỆT"),
    "Russian": ("Поезд прибывает в девять часов утра.", "ПОЕЗД"),
    "Greek": ("Ο Σίσυφος ανεβάζει τον βράχο.", "ΣΊΣΥΦΟΣ"),
    "Hebrew": ("שָׁלוֹם לְכֻלָּם וּבְרוּכִים הַבָּאִים", "שלום"),
    "Arabic": ("كَتَبَ الطَّالِبُ الرِّسَالَةَ", "الرسالة"),
    "Persian": ("من این کتاب را می\u200cخواهم", "میخواهم"),
    "Hindi": ("मैं हिन्दी में लिखता हूँ।", "हिन्दी"),
    "Tamil": ("நான் தமிழ் பேசுகிறேன்.", "தமிழ்"),
    "Bengali": ("আমি বাংলায় গান গাই।", "বাংলায়"),
    "Georgian": ("თბილისი საქართველოს დედაქალაქია.", "თბილისი"),
    "Armenian": ("Երևանը Հայաստանի մայրաքաղաքն է։", "երևանը"),
    "Amharic": ("አዲስ አበባ የኢትዮጵያ ዋና ከተማ ናት።", "አበባ"),
    "Chinese": ("东京是日本的首都。", "首都"),
    "Japanese": ("私は東京タワーを見ました。", "ﾀﾜｰ"),
    "Korean": ("학교에서 친구를 만나요.", "학교"),
    "Thai": ("ภาษาไทยเป็นภาษาราชการ", "ไทย"),
    "Lao": ("ພາສາລາວແມ່ນພາສາທາງການ", "ລາວ"),
    "Khmer": ("ភាសាខ្មែរជាភាសាផ្លូវការ", "ខ្មែរ"),
    "Burmese": ("မြန်မာစာသည် ရုံးသုံးဘာသာ", "မာစာ"),
    "full width": ("Ｔｈｅ ｖｅｒｓｉｏｎ １２", "version"),
    "emoji": ("The door is open 🙂👍🏽 now", "👍🏽"),
}
ENDINGS = [
    ("The users were searching their files.", "search file"),
    ("A search of one file by a user", "searching files users"),
    ("Die Häuser der Städte und ihre Katzen sind nicht alt.", "Haus Stadt Katze"),
    ("Das Haus ist mit einer Katze auf dem Berg.", "Häuser Katzen Berge"),
    ("Les maisons et les chevaux sont dans nos villages, qui parlaient.", "maison cheval village parler"),
    ("La maison est pour une famille qui parlait avec le cheval.", "maisons familles parler chevaux"),
    ("Los gatos comían en las casas blancas por la noche.", "gato casa blanca noches"),
    ("El gato come en la casa con una mesa para los niños.", "gatos casas mesas niño"),
    ("Книги лежат на столах в больших комнатах.", "книга стол комната"),
    ("Книга лежит на столе в комнате.", "книги столах комнаты"),
]


def finds(question: str, text: str) -> bool:
    """Whether a text has each word of a question."""
    terms = set(terms_of(text))
    return all(not terms.isdisjoint(forms) for forms in forms_of(question))


@pytest.mark.parametrize(("sentence", "word"), SENTENCES.values(), ids=SENTENCES)
def test_a_sentence_is_found_by_a_word_of_it_in_every_form(sentence, word):
    for stored in ("NFC", "NFD", "NFKC"):
        for asked in ("NFC", "NFD"):
            assert finds(unicodedata.normalize(asked, word), unicodedata.normalize(stored, sentence))
    others = [each for each, _ in SENTENCES.values() if each != sentence]
    assert sum(finds(word, other) for other in others) == 0


@pytest.mark.parametrize(("sentence", "words"), ENDINGS)
def test_a_sentence_is_found_by_other_forms_of_its_words(sentence, words):
    for word in words.split():
        assert finds(word, sentence)
        assert not finds(word, "The train leaves at nine, und das Licht brennt, mais lentement, y claro, поезд.")


def test_words_with_and_without_a_common_ending_stay_apart_in_phrases():
    assert words_of("Searching files") == ["searching", "files"]
    assert [set(forms) for forms in forms_of("searching search SEARCHES")] == [{"search", "searching"}]
    assert [set(forms) for forms in forms_of("les FILES und files")] == [{"le", "les"}, {"fil", "file"}, {"und"}]


def test_a_name_is_found_by_the_whole_and_by_its_parts_and_the_whole_counts():
    for name, parts in (("git-rebase", "git rebase"), ("max_tokens", "max tokens"), ("os.path.join", "path join")):
        text = f"Call “{name.upper()}()”, and then go on."
        assert finds(name, text)
        assert finds(parts, text)
        assert not finds(name, f"{parts} os")
        assert words_of(name) == name.replace("-", " ").replace("_", " ").replace(".", " ").split()


SIGNS = st.text("aZ0é ß-_./:+#“’…東京ガカ゛\u3099ー。한글국\u0301İ½ﾊ_", max_size=20)


@settings(max_examples=1000)
@given(SIGNS | st.text(max_size=20))
def test_the_quick_way_of_plain_runs_finds_the_same_words(text):
    for run in text.split():
        assert phrases._run_words(run) == tuple(found.word for found in phrases._words(run))
        for language in ("english", "german"):
            assert sorted(phrases._run_terms(run, language)) == sorted(phrases._any_terms(run, language))


TEXTS = [sentence for sentence, _ in SENTENCES.values()] + [sentence for sentence, _ in ENDINGS]
PIECES = [piece for text in TEXTS for piece in text.split()] + ["max_tokens", "C++", "C#", "½", "a\u0301", "“die”"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12))
def test_no_language_that_is_found_loses_a_passage_that_has_the_word(pieces):
    text = " ".join(pieces)
    for piece in pieces:
        assert finds(piece, text)


@settings(max_examples=300)
@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_loses_its_own_words(text, other):
    forms = [form for word in forms_of(f"{text} {other}") for form in word]
    assert len(forms) == len(set(forms))
    assert finds(text, f"{other} {text}\n{other}")
