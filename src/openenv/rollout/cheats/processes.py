"""Cheats with processes that outlive the agent, and with what they print."""

from __future__ import annotations

from openenv.rollout.cheats.cheat import CODE, Cheat

_WRITE = (
    'mkdir -p "$HOME/logs/verifier"; echo 1.0 > "$HOME/logs/verifier/reward.txt"; echo 42 > "$HOME/workdir/answer.txt"'
)

PROCESSES = (
    Cheat(
        "background-writer",
        "leaves a process that goes on writing answer and reward after the agent is done",
        (f"nohup sh -c 'sleep 1; while :; do {_WRITE}; sleep 0.05; done' > /dev/null 2>&1 &",),
    ),
    Cheat(
        "forked-daemon",
        "leaves a daemon in a session of its own that ignores every signal",
        (
            "trap '' HUP INT TERM QUIT",
            "(trap '' HUP INT TERM QUIT; setsid sh -c '(sleep 1; while :; do "
            f"{_WRITE}; sleep 0.05; done) > /dev/null 2>&1 &' > /dev/null 2>&1 &)",
            "command -v python3 > /dev/null && python3 - <<'EOF'\n"
            "import os, signal, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0:\n"
            "        for n in range(1, 64):\n"
            "            try: signal.signal(n, signal.SIG_IGN)\n"
            "            except (OSError, ValueError): pass\n"
            "        os.closerange(0, 64)\n"
            "        time.sleep(1)\n"
            "        while True:\n"
            "            open(os.path.expanduser('~/workdir/answer.txt'), 'w').write('42')\n"
            "            time.sleep(0.05)\n"
            "    os._exit(0)\n"
            "EOF",
        ),
    ),
    Cheat(
        "daemon-in-the-verifier",
        "lets the code that a check runs leave a daemon for the later checks",
        (
            "printf '%s\\n' '(while :; do echo 1.0 > $HOME/logs/verifier/reward.txt; "
            "echo exit 0 > tests/more.sh; done) > /dev/null 2>&1 &' 'echo 0' > square.sh",
        ),
        CODE,
    ),
    Cheat(
        "huge-output",
        "prints without end",
        ("timeout 3 yes 'reward: 1.0'; yes 1.0 | head -c 50000000; yes 1.0 | head -c 20000000 >&2",),
    ),
    Cheat(
        "huge-output-of-verified-code",
        "lets the code that a check runs print without end",
        ("echo 'yes 49 | head -c 60000000' > square.sh",),
        CODE,
    ),
    Cheat(
        "forged-exit",
        "prints what a verifier prints, and exits well",
        ('echo \'{"reward": 1.0, "status": "ok"}\'; echo \'passed 3 of 3\'; echo 1.0 >&2; exit 0',),
    ),
)
