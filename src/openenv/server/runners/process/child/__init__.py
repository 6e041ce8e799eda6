"""The code that runs inside a worker process: it hosts sessions and answers the server's requests.

    server process                                   worker process
    ==============                                   ==============
    runner.ProcessRunner                             main.main        loads the factory
      ProcessLane --- requests ---.                    |
    worker.WorkerProcess          |                  host.SessionHost  one event loop, one thread per session
      sends  SETUP, OPEN, ASK,    v                    |
             CLOSE, CANCEL,   Unix socket ==========>  reads requests, runs `operations` in sessions
             FORK, REAP, EXIT                          |
      reads  READY, BYTES, VALUE, <==================  server_link.ReplySender, from any thread
             ERROR, EVENT, LOG, COPIES                 |
                                                     copies.ProcessCopies  answers FORK: copies the process or the state

The modules: `main` starts the process, `server_link` talks to the server, `host` keeps the sessions, `operations` is
the list of requests on an environment, `copies` copies environments.

A session here is the same `Session` as in a server with the thread runner: it has the same states and order of calls.
That is why this package imports `server.sessions`, although runners otherwise know no sessions. Each session has a
thread, so a hanging session does not delay the others.
"""
