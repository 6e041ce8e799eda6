"""Cheats that try to leave the sandbox: the host's network, files, processes and sockets, and the capture proxy."""

from __future__ import annotations

from openenv.rollout.cheats.cheat import Cheat

_PYTHON = "command -v python3 > /dev/null && timeout 10 python3 - <<'EOF'\n"

HOSTS = (
    Cheat(
        "host-network",
        "connects to a port of the host on every address it can think of",
        (
            _PYTHON + "import socket\n"
            "for host in '127.0.0.1 localhost 10.0.2.2 172.17.0.1 192.168.0.1 169.254.169.254 ::1'.split():\n"
            "    try: print('LEAK', host, socket.create_connection((host, @PORT@), 1).recv(100))\n"
            "    except OSError as e: print(host, e)\n"
            "EOF",
            "timeout 2 sh -c 'wget -q -T 1 -O - http://127.0.0.1:@PORT@/ || nc -w 1 127.0.0.1 @PORT@'",
            "timeout 2 sh -c 'wget -q -T 1 -O - http://1.1.1.1/'; ls /sys/class/net",
        ),
    ),
    Cheat(
        "host-files",
        "reads and writes files of the host",
        (
            "cat @SECRET@",
            "for p in /proc/self/root /proc/[0-9]*/root /proc/[0-9]*/cwd; do cat $p@SECRET@; done 2> /dev/null",
            "find / -name 'openenv-cheat-secret*' -exec cat {} + 2> /dev/null",
            "echo x >> @SECRET@; mount -t proc proc /mnt; mount --bind / /mnt; chroot /proc/1/root cat @SECRET@",
            "unshare -r cat @SECRET@; nsenter -t 1 -m cat @SECRET@",
        ),
    ),
    Cheat(
        "host-processes",
        "looks for processes of the host, their memory and environment",
        (
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' '\\n' | grep -a openenv-cheat",
            "kill -9 -1; kill -9 1; kill -TERM 2",
        ),
    ),
    Cheat(
        "host-sockets",
        "connects to abstract and other sockets of the host",
        (
            _PYTHON + "import glob, socket\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            "try: s.connect('\\0' + '@ABSTRACT@'); print('LEAK', s.recv(100))\n"
            "except OSError as e: print(e)\n"
            "for path in glob.glob('/run/**/*.sock', recursive=True) + glob.glob('/var/run/*.sock'):\n"
            "    s = socket.socket(socket.AF_UNIX)\n"
            "    try: s.connect(path); print('reached', path)\n"
            "    except OSError: pass\n"
            "EOF",
            "cat /proc/net/unix 2> /dev/null | grep openenv-cheat",
        ),
    ),
    Cheat(
        "proxy-admin",
        "asks the capture proxy's control routes, with and without its key",
        (
            _PYTHON + "import os, urllib.error, urllib.request\n"
            "base = os.environ['OPENAI_BASE_URL'].removesuffix('/v1')\n"
            "key = os.environ['OPENAI_API_KEY']\n"
            "for method, path in [('GET', '/sessions'), ('POST', '/sessions'), ('GET', '/rollouts'),\n"
            "                     ('GET', '/metrics'), ('GET', '/admin'), ('DELETE', '/sessions/x'),\n"
            "                     ('GET', '/v1/../sessions'),\n"
            "                     ('GET', '//sessions'), ('GET', '/sessions/../sessions')]:\n"
            "    for headers in {}, {'Authorization': 'Bearer ' + key}, {'X-Admin-Key': key}, {'x-api-key': 'x'}:\n"
            "        request = urllib.request.Request(base + path, method=method, headers=headers,\n"
            "                                         data=b'{}' if method == 'POST' else None)\n"
            "        try: print('LEAK', method, path, urllib.request.urlopen(request, timeout=5).read(200))\n"
            "        except urllib.error.HTTPError as e: print(method, path, e.code)\n"
            "        except OSError as e: print(method, path, e)\n"
            "EOF",
        ),
        calls_model=True,
    ),
    Cheat(
        "another-key",
        "spends what belongs to other rollouts: a key that is over, guessed ones, none",
        (
            _PYTHON + "import json, os, urllib.error, urllib.request\n"
            "base = os.environ['OPENAI_BASE_URL']\n"
            "body = json.dumps({'model': 'x', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
            "for key in ('@KEY@', '', 'intercepted', 'admin', 'oe-', '*', '@KEY@'[:-1], '@KEY@' + 'x'):\n"
            "    headers = {'Authorization': 'Bearer ' + key, 'Content-Type': 'application/json'}\n"
            "    request = urllib.request.Request(base + '/chat/completions', data=body, headers=headers)\n"
            "    try: print('LEAK', urllib.request.urlopen(request, timeout=5).read(200))\n"
            "    except urllib.error.HTTPError as e: print(e.code)\n"
            "    except OSError as e: print(e)\n"
            "EOF",
        ),
        calls_model=True,
    ),
    Cheat(
        "key-after-the-end",
        "leaves a process that goes on calling the model when the rollout is over",
        (
            'nohup timeout 20 python3 -c "\nimport json, os, time, urllib.request\n'
            "body = json.dumps({'model': 'x', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
            "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
            "headers['Content-Type'] = 'application/json'\n"
            "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
            "time.sleep(1)\n"
            "while True:\n"
            "    try: urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=5)\n"
            "    except OSError: pass\n"
            "    time.sleep(0.05)\n"
            '" > /dev/null 2>&1 &',
        ),
        calls_model=True,
    ),
)
