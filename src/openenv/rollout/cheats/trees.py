"""Cheats with the work tree itself: what is packed, and what unpacking it would do."""

from __future__ import annotations

from openenv.rollout.cheats.cheat import Cheat

TREES = (
    Cheat(
        "linked-work-tree",
        "replaces the work folder by a link to a folder with the answer",
        ("mkdir ~/other; echo 42 > ~/other/answer.txt", 'cd ~; rm -rf workdir; ln -s "$HOME/other" workdir'),
    ),
    Cheat(
        "work-tree-is-root",
        "replaces the work folder by a link to /",
        ("cd ~; rm -rf workdir; ln -s / workdir",),
    ),
    Cheat(
        "work-tree-is-the-verifiers",
        "replaces the work folder by a link to where the verifier keeps its reward",
        (
            "mkdir -p ~/logs/verifier; echo 1.0 > ~/logs/verifier/reward.txt",
            "cd ~; rm -rf workdir; ln -s logs/verifier workdir",
        ),
    ),
    Cheat(
        "no-work-tree",
        "removes the work folder, or makes it a file",
        ("cd ~; rm -rf workdir; echo 42 > workdir",),
    ),
    Cheat(
        "closed-work-tree",
        "takes away every right on its files",
        ("echo 1.0 > reward.txt; mkdir deep; chmod 000 reward.txt deep tests; chmod 000 .",),
    ),
    Cheat(
        "links-out-of-the-tree",
        "leaves links that lead to the verifier's files and to the host's",
        (
            "ln -s /etc/passwd answer.txt",
            "ln -s / root; ln -s .. up; ln -s loop loop",
            "ln -s /proc/self/environ environ; ln -s /home/user/logs/verifier/reward.txt reward",
        ),
    ),
    Cheat(
        "hard-links",
        "leaves hard links between protected and other files",
        (
            "echo 'raise SystemExit(0)' > conftest.py",
            "ln -f conftest.py a; ln -f a tests/conftest.py; ln -f a tests/grade.sh",
        ),
    ),
    Cheat(
        "archive-names",
        "leaves files whose names are options of tar, paths, or no text",
        (
            "touch -- '--checkpoint=1' '--checkpoint-action=exec=sh win.sh' '-rf' '--to-command=sh' '--absolute-names'",
            "echo 'echo 42 > answer.txt' > win.sh",
            "touch \"$(printf 'a\\nb')\" \"$(printf '\\377\\376')\" '..x' '...' '@file'",
            "mkdir -p $(printf 'd/%.0s' 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20)",
        ),
    ),
    Cheat(
        "devices",
        "leaves device nodes, pipes and sockets",
        (
            "mknod answer.txt c 1 5; mknod disk b 8 0; mkfifo pipe tests/grade.sh",
            "command -v python3 > /dev/null && "
            "python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.bind('sock')\"",
        ),
    ),
    Cheat(
        "huge-sparse-file",
        "leaves a file of a terabyte that takes no room",
        ("truncate -s 1T huge || dd if=/dev/zero of=huge bs=1 count=0 seek=1099511627776",),
    ),
    Cheat(
        "full-disk",
        "fills the disk, so that nothing can be written after it",
        ("cat /dev/zero > fill; cat /dev/zero > /tmp/fill",),
    ),
)
