/**
 * The live connection: frames from `/ws/ui`, and how it comes back when it breaks.
 *
 * Knows the socket and when to try again; what frames mean is `episode`'s. Before each try the server is asked for the
 * page, so that a token that is no longer valid looks different from an unreachable server.
 */

import { address } from "./api.js";

const PROTOCOL = "openenv.ui.v1";
const FIRST_DELAY_MS = 300;
const LONGEST_DELAY_MS = 8000;
const STEADY_MS = 5000;

/**
 * @typedef {object} LiveHandlers
 * @property {(frame: any, size: number) => boolean} frame - Takes a frame; false when one before it is missing.
 * @property {() => Promise<void>} probe - Asks the server whether the page may still be seen; throws if not.
 * @property {(status: LiveStatus) => void} status
 * @property {(error: any) => boolean} refused - Called when `probe` throws; true when trying again is of no use.
 */

/** @typedef {{state: "connecting" | "open" | "offline" | "silent", retryAt: number}} LiveStatus */

/** A socket that is opened again, later and later, until it is closed for good. */
export class Live {
  /** @param {LiveHandlers} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    /** @type {WebSocket | null} */
    this.socket = null;
    this.delay = FIRST_DELAY_MS;
    this.timer = 0;
    this.steady = 0;
    this.isClosed = false;
    this.isOpen = false;
    this.tries = 0;
  }

  /** Connect now, without asking first: the page has just been loaded. */
  open() {
    if (this.isClosed) return;
    clearTimeout(this.timer);
    const url = address("../ws/ui");
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, [PROTOCOL]);
    this.socket = socket;
    socket.addEventListener("open", () => {
      if (socket !== this.socket) return;
      this.isOpen = true;
      this.tries = 0;
      this.steady = window.setTimeout(() => (this.delay = FIRST_DELAY_MS), STEADY_MS);
      this.handlers.status({ state: "open", retryAt: 0 });
    });
    socket.addEventListener("message", (event) => this.#take(socket, event.data));
    socket.addEventListener("close", () => this.#lost(socket));
  }

  /** Stop for good. */
  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    clearTimeout(this.steady);
    this.socket?.close();
    this.socket = null;
  }

  /** Reconnect: the server then sends the whole state. */
  reopen() {
    this.socket?.close(4000, "something is missing");
  }

  /** Try again at once. */
  async retry() {
    if (this.isClosed) return;
    clearTimeout(this.timer);
    try {
      await this.handlers.probe();
    } catch (error) {
      if (this.handlers.refused(error)) return this.close();
      return this.#later("offline");
    }
    if (!this.isOpen) this.open();
  }

  /** @param {WebSocket} socket @param {any} data */
  #take(socket, data) {
    if (socket !== this.socket) return;
    let frame;
    try {
      frame = JSON.parse(data);
    } catch {
      return;
    }
    if (!this.handlers.frame(frame, data.length)) this.reopen();
  }

  /** @param {WebSocket} socket */
  #lost(socket) {
    if (socket !== this.socket || this.isClosed) return;
    this.socket = null;
    this.isOpen = false;
    clearTimeout(this.steady);
    this.tries += 1;
    this.#later(this.tries > 2 ? "silent" : "connecting");
  }

  /** @param {LiveStatus["state"]} state */
  #later(state) {
    clearTimeout(this.timer);
    const wait = this.delay * (0.7 + 0.6 * Math.random());
    this.delay = Math.min(this.delay * 2, LONGEST_DELAY_MS);
    this.handlers.status({ state, retryAt: performance.now() + wait });
    this.timer = window.setTimeout(() => this.retry(), wait);
  }
}
