"""`git bisect run` with reproduce.py --bisect over a small repository of builders finds the commit that regressed."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "repro" / "reproduce.py"
GOOD = '''from stalegraph import ops
from stalegraph.builders import CopyingBuilder


class ServingBuilder(CopyingBuilder):
    """Decode metadata in buffers that stay."""

    def plan(self, seq_lens):
        metadata, num_splits = ops.get_mla_metadata_dense_fp8(seq_lens, self.num_heads, 1)
        self.metadata.copy_(metadata)
        self.num_splits[: num_splits.shape[0]].copy_(num_splits)
        return self.metadata, self.num_splits[: num_splits.shape[0]]
'''
REGRESSED = GOOD[: GOOD.index("        self.metadata.copy_")] + "        return metadata, num_splits\n"
# The fifth commit brings the bug; the third and seventh cannot be imported, which decides nothing.
HISTORY = [
    ("begin", GOOD),
    ("say more", GOOD + "\n# planned by FlashMLA\n"),
    ("move a module", "import somewhere_else\n" + GOOD),
    ("put it back", GOOD + "\nVERSION = 1\n"),
    ("tidy up: hand on the planner's own tensors", REGRESSED),
    ("count versions", REGRESSED + "\nVERSION = 2\n"),
    ("try a rename", "import somewhere_else\n" + REGRESSED),
    ("count on", REGRESSED + "\nVERSION = 3\n"),
]


def git(folder, *words):
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bisect_finds_the_regressing_commit(tmp_path):
    git(tmp_path, "init", "--quiet")
    commits = []
    for message, content in HISTORY:
        (tmp_path / "builder.py").write_text(content)
        git(tmp_path, "add", "builder.py")
        git(tmp_path, "commit", "--quiet", "-m", message)
        commits.append(git(tmp_path, "rev-parse", "HEAD").strip())
    git(tmp_path, "bisect", "start", commits[-1], commits[0])
    command = [sys.executable, str(SCRIPT), "--bisect", "--builder-file", "builder.py", "--tokens", "3"]
    said = git(tmp_path, "bisect", "run", *command)
    assert f"{commits[4]} is the first bad commit" in said
    assert git(tmp_path, "rev-parse", "refs/bisect/bad").strip() == commits[4]
