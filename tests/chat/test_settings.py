"""The settings file: what is read, what is reported, and what a change leaves alone."""

import os
import stat
import threading
from dataclasses import fields, replace

import pytest

from tinychat.backend.address import Server
from tinychat.chat import servers, settings
from tinychat.chat.parameters import PARAMETERS, Parameters, set_parameter
from tinychat.chat.servers import SavedServer
from tinychat.errors import TinychatError

FULL = """# my settings
model = "glm-4.7:flash"  # the big one
threads = 6
theme = "nord"
kv_cache_gb = 12.5
future = "kept"

[parameters]
temperature = 0.25
top_k = 7
seed = 42
system = "be kind"
thinking = false
glow = 1

[presets.coder]
system = "You write Python."
temperature = 0

[models."mine"]
url = "https://example.org/m.gguf"
quant = "Q4_0"
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "deep" / "settings.toml"


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_reads_everything(file):
    write(file, FULL)
    s = settings.load(file)
    assert (s.model, s.threads, s.theme, s.kv_cache_gb) == ("glm-4.7:flash", 6, "nord", 12.5)
    p = s.parameters
    assert (p.system, p.thinking, p.seed, p.sampling.temperature, p.sampling.top_k) == ("be kind", False, 42, 0.25, 7)
    assert s.presets["coder"].system == "You write Python." and s.presets["coder"].sampling.temperature == 0
    assert [(m.name, m.quant, m.sources) for m in s.models] == [("mine", "Q4_0", ("https://example.org/m.gguf",))]
    assert len(s.problems) == 2 and "'future'" in s.problems[0] and "'glow' in [parameters]" in s.problems[1]


def test_no_file_is_defaults(file):
    assert settings.load(file) == settings.Settings()
    assert settings.Settings().problems == ()


def test_the_default_place_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if settings.path().is_relative_to(tmp_path):  # where the platform has XDG folders
        settings.update(theme="nord")
        assert (tmp_path / "tinychat" / "settings.toml").is_file() and settings.load().theme == "nord"
    assert settings.path().name == "settings.toml"


DEEP = f"a = {'[' * 20_000}{']' * 20_000}"


@pytest.mark.parametrize(
    "bad", ["model = ", "a = 1\na = 2", "\x00", "[parameters\n", "model = 'x'\n\x1b[31m = 3", DEEP]
)
def test_a_broken_file_is_one_line_and_never_overwritten(file, bad):
    write(file, bad)
    s = settings.load(file)
    assert replace(s, problems=()) == settings.Settings()
    assert (
        len(s.problems) == 1
        and "\n" not in s.problems[0]
        and "\x1b" not in s.problems[0]
        and str(file) in s.problems[0]
    )
    for change in (lambda: settings.update(file, theme="x"), lambda: settings.save_preset("p", Parameters(), file)):
        with pytest.raises(TinychatError) as e:
            change()
        assert "\n" not in str(e.value) and "\x1b" not in str(e.value)
    assert file.read_text(encoding="utf-8") == bad


def test_bytes_that_are_no_text(file):
    file.parent.mkdir()
    file.write_bytes(b"model = '\xff\xfe'")
    assert len(settings.load(file).problems) == 1
    file.unlink()
    os.mkfifo(file)  # which nobody writes
    assert "not a file" in settings.load(file).problems[0]
    with pytest.raises(TinychatError):
        settings.update(file, theme="x")


WRONG = [
    ("threads = 0", "threads"),
    ("threads = true", "threads"),
    ("model = 3", "model"),
    ("kv_cache_gb = -1", "kv_cache_gb"),
    ("kv_cache_gb = nan", "kv_cache_gb"),
    ("parameters = 3", "parameters"),
    ("presets = []", "presets"),
    ("[presets]\na = 1", "presets.a"),
    ("[parameters]\ntemperature = 99", "temperature"),
    ("[parameters]\ntop_k = 1.5", "top_k"),
    ("[parameters]\nsystem = 1", "system"),
    ("[parameters]\nthinking = 'no'", "thinking"),
    ("[parameters]\ntop_p = 'x'", "top_p"),
    ("[models.x]\nquant = 'Q4_0'", 'models."x"'),
    ("[models.x]\nurl = 3", "url"),
    ("models = 1", "models"),
]


@pytest.mark.parametrize("text,name", WRONG)
def test_a_wrong_value_is_named_and_its_default_used(file, text, name):
    write(file, text)
    s = settings.load(file)
    assert len(s.problems) == 1 and name in s.problems[0]
    assert replace(s, problems=()) == replace(settings.Settings(), presets=s.presets)
    assert all(p == Parameters() for p in s.presets.values())
    settings.update(file, theme="nord")  # a change elsewhere does not repair, and does not destroy, what the user wrote
    assert settings.load(file).problems == s.problems and settings.load(file).theme == "nord"


ODD = (
    "-1",
    "1e400",
    "nan",
    "9" * 400,
    "0x" + "f" * 9000,
    "true",
    '""',
    '"\\u0000"',
    "[]",
    "[{a = 1}]",
    "{}",
    "{a = {b = 1}}",
)
ODD += ("1979-05-27", "'~nosuch/x'", '"http://[::1/"')


def test_any_value_anywhere_is_a_line_and_ends_nothing():
    keys = [f.name for f in fields(settings.Settings) if f.name not in ("parameters", "presets", "models", "servers")]
    places = [*keys, "parameters", "presets", "models", "servers", "parameters.thinking"]
    places += [f"{table}.{name}" for table in ("parameters", "presets.a") for name in PARAMETERS]
    places += [f"models.m.{key}" for key in ("path", "url", "size", "mtp_of")] + ["servers.s.url", "servers.s.key_file"]
    for place in places:
        for value in ODD:
            read = settings.parse(f"threads = 3\n{place} = {value}\n" if place != "threads" else f"threads = {value}\n")
            assert read.threads == (None if place == "threads" else 3), (place, value)
            assert all("\n" not in line and len(line) < 300 for line in read.problems)


def test_tables_of_another_form_are_added_to_or_refused(file):
    changes = (
        lambda: settings.save_preset("p", Parameters(system="a\nb"), file).presets["p"].system == "a\nb",
        lambda: settings.save_server(SavedServer("s", "http://box:1"), file).servers[-1].name == "s",
        lambda: "p" not in settings.delete_preset("p", file).presets,
        lambda: not settings.delete_server("s", file).servers,
    )
    for value in ODD:
        for table, some in (("presets", changes[::2]), ("servers", changes[1::2])):
            write(file, f"{table} = {value}\n")
            for change in some:
                try:
                    assert change()
                except TinychatError:
                    assert file.read_text() == f"{table} = {value}\n"


def test_a_change_keeps_comments_unknown_keys_and_the_rest(file):
    write(file, FULL)
    settings.update(file, model="smollm2:135m", threads=None)
    text = file.read_text()
    expected = FULL.replace('"glm-4.7:flash"', '"smollm2:135m"').replace("threads = 6\n", "")
    assert text == expected


def test_two_instances_do_not_undo_each_other(file):
    settings.update(file, theme="nord")
    settings.update(file, model="a")
    settings.save_preset("p", Parameters(system="s"), file)
    s = settings.load(file)
    assert (s.theme, s.model, s.presets["p"].system) == ("nord", "a", "s")


def test_changes_at_the_same_time_are_all_kept(file):
    """Of threads here, which wait as processes do."""
    settings.update(file, threads=1)  # the folder is there

    def change(who):
        for n in range(6):
            settings.save_preset(f"{who}{n}", Parameters(system="x"), file)

    threads = [threading.Thread(target=change, args=(who,)) for who in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(settings.load(file).presets) == 18


def test_every_parameter_comes_back(file):
    p = Parameters(system='say "hi"\nback\\slash', thinking=False)
    for i, (name, spec) in enumerate(PARAMETERS.items(), 1):
        p = set_parameter(p, name, str(spec.kind(min(spec.high, spec.low + i))))
    settings.update(file, parameters=p)
    settings.save_preset("a b.c", p, file)
    s = settings.load(file)
    assert s.parameters == p and s.presets == {"a b.c": p} and not s.problems
    settings.update(file, parameters=Parameters())
    assert settings.load(file).parameters == Parameters() and settings.load(file).presets == {"a b.c": p}


def test_presets_are_replaced_and_deleted(file):
    write(file, FULL)
    settings.save_preset(" coder ", Parameters(system="Rust"), file)
    assert settings.load(file).presets == {"coder": Parameters(system="Rust")}
    settings.save_preset("other", Parameters(), file)
    assert set(settings.delete_preset("coder", file).presets) == {"other"}
    assert set(settings.delete_preset("nobody", file).presets) == {"other"}
    odd = settings.save_preset("odd \ud800", Parameters(system="\ud800"), file)  # a paste of half a character
    assert odd.presets["odd \ufffd"] == settings.load(file).presets["odd \ufffd"] == Parameters(system="\ufffd")
    with pytest.raises(TinychatError):
        settings.save_preset("  ", Parameters(), file)
    assert "be kind" in file.read_text()


def test_one_bad_model_leaves_all_else_as_it_is(file):
    write(
        file,
        'theme = "nord"\n'
        '[models.a]\npath = "~nosuchuser/x.gguf"\n[models.b]\nurl = "http://[::1/x.gguf"\n'
        '[models.c]\nurl = "https://example.org/m.gguf"\n',
    )
    read = settings.load(file)
    assert read.theme == "nord" and [m.name for m in read.models] == ["c"] and len(read.problems) == 2
    assert "~nosuchuser/x.gguf" in read.problems[0] and "http://[::1/x.gguf" in read.problems[1]


def test_what_is_written_is_private(file):
    settings.update(file, theme="x")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_editing_the_whole_text(file):
    with pytest.raises(TinychatError):
        settings.write_text("a = ", file)
    assert not file.exists()
    assert settings.write_text(FULL, file).model == "glm-4.7:flash"
    assert file.read_text() == FULL


def test_writing_through_a_link_keeps_it_and_makes_the_file_private(tmp_path):
    real, link = tmp_path / "dotfiles.toml", tmp_path / "settings.toml"
    real.write_text("theme = 'a'\n")
    real.chmod(0o640)
    link.symlink_to(real)
    settings.update(link, theme="b")
    assert link.is_symlink() and 'theme = "b"' in real.read_text() and stat.S_IMODE(real.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["dotfiles.toml", "settings.toml"]  # and no temporary file


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TinychatError) as e:
        settings.update(tmp_path / "file" / "settings.toml", theme="x")
    assert "\n" not in str(e.value)


def test_servers_are_read_and_what_is_wrong_is_said_without_a_key(file):
    write(
        file,
        '[servers.box]\nurl = "http://box:8080/v1"\nkey_env = "BOX_KEY"\n'
        '[servers.a]\nurl = "box:1"\nkey = "sk-secret"\n[servers.b]\nurl = "http://u:sk-secret@b"\n'
        '[servers.c]\nurl = "ftp://c"\n[servers.d]\nurl = "d"\nport = "1"\n'
        '[servers.e]\nurl = "e"\nkey_env = "A"\nkey_file = "b"\n[servers.f]\nurl = "f"\nkey_env = "sk-secret x"\n',
    )
    s = settings.load(file)
    assert s.servers == (SavedServer("box", "http://box:8080", key_env="BOX_KEY"),)
    assert len(s.problems) == 6 and "key_env or key_file" in s.problems[0]
    assert "sk-secret" not in " ".join(s.problems)


def test_a_server_is_saved_changed_and_forgotten(file):
    write(file, "# mine\n" + FULL.split("[parameters]")[0])
    s = settings.save_server(SavedServer("b.o x", "http://box:8080", "m", key_file="~/k"), file)
    assert s.servers == (SavedServer("b.o x", "http://box:8080", "m", key_file="~/k"),)
    s = settings.save_server(SavedServer("b.o x", "http://box:9"), file)
    assert s.servers == settings.load(file).servers == (SavedServer("b.o x", "http://box:9"),)
    assert settings.delete_server("b.o x", file).servers == () and file.read_text().startswith("# mine\n")
    with pytest.raises(TinychatError, match="no server's address"):
        settings.save_server(SavedServer("x", "not a place"), file)


def test_the_key_is_read_when_it_is_used(tmp_path, monkeypatch):
    server = SavedServer("box", "http://box:8080", key_env="BOX_KEY")
    monkeypatch.delenv("BOX_KEY", raising=False)
    monkeypatch.setenv("TINYCHAT_API_KEY", "of another server")
    with pytest.raises(TinychatError, match="BOX_KEY with its key is not set"):
        server.connection()
    monkeypatch.setenv("BOX_KEY", "sk-secret")
    assert server.connection().key == "sk-secret" and "sk-secret" not in repr(server.connection())
    assert SavedServer("box", "http://box:8080").connection().key is None
    file = tmp_path / "key"
    file.write_text("sk-file\n")
    file.chmod(0o644)
    with pytest.raises(TinychatError, match="can be read by others"):
        SavedServer("box", "http://box:8080", key_file=str(file)).connection()
    file.chmod(0o600)
    assert SavedServer("box", "http://box:8080", key_file=str(file)).connection().key == "sk-file"


def test_a_server_by_name_or_address():
    box = SavedServer("Box", "http://box:8080", "m")
    assert servers.find([box], "box ") == box and servers.find([box], "box/n").model == "n"
    assert servers.find([box], "boxes") is None
    assert servers.chosen([box], "BOX", "other", None) == Server("http://box:8080", "other", None)
    for text in ("http://box", "http://box:8080/", "https://llm.example.com/v1", "https://a.b/api/v1/"):
        assert servers.is_address(text), text
    for text in ("http://box/m.gguf", "https://huggingface.co/a/b", "box", "/home/me", "http://u:p@box"):
        assert not servers.is_address(text), text
