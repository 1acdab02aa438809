"""Kinds of tools that search, and that work with files and programs."""

from tools.pico.tools import words as tool_words
from tools.pico.tools.kind import TEXT, Kind, Slot, said

_PATH = Slot(
    ("path", "file", "filename", "file_path", "name"),
    tool_words.path,
    descriptions=("path of the file", "the file", "name of the file"),
)
KINDS = (
    Kind(
        "search",
        ("search", "web search", "search web", "find", "search for"),
        ("Search the web.", "Search for something.", "Search the internet.", "Finds pages about a subject."),
        (
            Slot(
                ("query", "q", "text", "keywords", "subject"),
                lambda draw: " ".join(draw.several(tool_words.SUBJECTS, draw.number(1, 2))),
                descriptions=("what to search for",),
            ),
        ),
        ("Search for {0}.", "Search the web for {0}.", "Find something about {0}.", "Please search for {0}."),
        lambda draw, values: f"{draw.number(1, 99)} pages about {tool_words.word(draw)}",
        "The search for {0} found: {r}.",
        ("result", "found", "pages"),
    ),
    Kind(
        "read",
        ("read", "read file", "open file", "view", "cat", "get file"),
        (
            "Read a file.",
            "Reads the content of a file.",
            "Show what is in a file.",
            "Returns the text of a file.",
        ),
        (_PATH,),
        (
            "Read the file {0}.",
            "What is in {0}?",
            "Read {0}.",
            "Show me the file {0}.",
            "What does {0} say?",
            "Open {0}.",
        ),
        lambda draw, values: tool_words.phrase(draw),
        "The file {0} says: {r}.",
        ("content", "text", "result"),
    ),
    Kind(
        "write",
        ("write", "write file", "create file", "save file"),
        (
            "Write a file.",
            "Writes text to a file.",
            "Create a file with some content.",
            "Save text in a file.",
        ),
        (_PATH, TEXT),
        (
            "Write {1} to the file {0}.",
            'Write "{1}" into {0}.',
            "Save {1} in {0}.",
            "Create {0} with the text: {1}",
        ),
        said("written"),
        "The file {0}: {r}.",
        ("status", "result"),
    ),
    Kind(
        "list",
        ("list", "list files", "ls", "list folder", "list directory", "glob"),
        ("List the files of a folder.", "List a directory.", "Shows which files are in a folder."),
        (
            Slot(
                ("path", "folder", "directory", "dir"),
                lambda draw: draw.one(tool_words.FOLDERS) if draw.chance(0.7) else tool_words.made_up(draw),
            ),
        ),
        (
            "List the files in {0}.",
            "What files are in {0}?",
            "Which files are in the folder {0}?",
            "List {0}.",
        ),
        lambda draw, values: ", ".join(tool_words.path(draw) for _ in range(draw.number(1, 3))),
        "In {0} there are: {r}.",
        ("files", "result", "names"),
    ),
    Kind(
        "run",
        ("run", "bash", "shell", "run command", "execute", "terminal"),
        ("Run a command.", "Runs a shell command.", "Execute a command in the terminal."),
        (
            Slot(
                ("command", "cmd", "line", "script"),
                lambda draw: (
                    f"{draw.one(['ls', 'cat', 'make', 'git', 'python', 'echo'])} {tool_words.word(draw)}"
                ),
            ),
        ),
        ("Run {0}.", "Run the command {0}.", "Execute {0}.", "Please run: {0}"),
        lambda draw, values: draw.one(
            ["ok", "done", f"{draw.number(1, 99)} tests passed", tool_words.phrase(draw)]
        ),
        "The command says: {r}.",
        ("output", "stdout", "result"),
    ),
)
