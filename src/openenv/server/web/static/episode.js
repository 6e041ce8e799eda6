/**
 * The episode that the page shows: what frames and replies have brought so far.
 *
 * Knows frames; must not know elements. Views subscribe, and are called at most once per drawn
 * picture, however many frames came.
 */

import { PastEpisodes } from "./past_episodes.js";

const MAX_LOG = 1000;
const MAX_LOG_CHARS = 32_000_000;
const MAX_EVENTS = 200;

/** @typedef {{label: string, action: Record<string, any>}} Offered */
/** @typedef {{html: string | null, actions: Offered[]}} Render */
/**
 * @typedef {object} StepEntry
 * @property {string} timestamp
 * @property {any} action
 * @property {any} observation
 * @property {number | boolean | null} reward
 * @property {boolean} done
 * @property {number} step_count
 * @property {number} [duration_ms]
 */
/**
 * @typedef {object} CallEntry
 * @property {string} timestamp
 * @property {string} name
 * @property {any} arguments
 * @property {any} result
 * @property {any} error
 * @property {number} [duration_ms]
 */
/** @typedef {{kind: "step", entry: StepEntry, size: number}} StepItem */
/** @typedef {StepItem | {kind: "call", entry: CallEntry, size: number}} LogItem */

/** What is known of the visitor's episode and session. */
export class Episode {
  /** @type {string | null} */
  episodeId = null;
  stepCount = 0;
  isReset = false;
  /** Whether the session that it belongs to has ended. */
  isOver = false;
  /** @type {any} */
  observation = null;
  /** What the episode began with, where that was seen. @type {any} */
  first = null;
  /** @type {number | boolean | null} */
  reward = null;
  done = false;
  /** @type {LogItem[]} */
  log = [];
  /** How many items were too many for the log. */
  dropped = 0;
  /** How long the log's items were as text, all together. */
  chars = 0;
  /** Of all rewards. */
  total = 0;
  /** What the episode was reset with, where it was. @type {any} */
  seed = null;
  past = new PastEpisodes();
  /** @type {Render} */
  render = { html: null, actions: [] };

  constructor() {
    /** @type {Set<() => void>} */
    this.listeners = new Set();
    this.isConnected = true;
    this.isScheduled = false;
    /** @type {number | null} */
    this.lastFrame = null;
    /** The number of resets, steps and calls so far. */
    this.happenings = 0;
    this.version = 0;
    /** @type {{state: "none" | "ready" | "busy" | "lost", reason: string | null}} */
    this.session = { state: "none", reason: null };
    /** @type {{data: any, timestamp: string}[]} */
    this.events = [];
    /** @type {{message: string, code: string} | null} */
    this.failure = null;
    /** When the session was last seen to begin to work, in the time of `performance.now()`. */
    this.busySince = 0;
  }

  /** @param {() => void} listener */
  subscribe(listener) {
    this.listeners.add(listener);
    listener();
  }

  /** Whether something runs in the session. */
  get isBusy() {
    return this.session.state === "busy";
  }

  /** The steps among the log's items. @returns {StepEntry[]} */
  get steps() {
    return this.log.filter((item) => item.kind === "step").map((item) => /** @type {StepEntry} */ (item.entry));
  }

  /**
   * Take a frame of `openenv.ui.v1`.
   * @param {any} frame
   * @param {number} [size] - Its length as text.
   * @returns {boolean} False if a frame before this one is missing.
   */
  apply(frame, size = 0) {
    const n = typeof frame.n === "number" ? frame.n : null;
    if (frame.type !== "hello" && n !== null && this.lastFrame !== null && n !== this.lastFrame + 1) return false;
    if (n !== null) this.lastFrame = n;
    this.#take(frame, size);
    this.changed();
    return true;
  }

  /**
   * Take a reply to a reset, for a page that gets no frames.
   * @param {Record<string, any>} options
   * @param {any} reply
   */
  applyReset(options, reply) {
    this.apply({ type: "reset", ...reply, episode_id: null, seed: options.seed, render: null });
    this.setSession("ready", null);
  }

  /**
   * Take a reply to a step, for a page that gets no frames.
   * @param {any} action
   * @param {any} reply
   */
  applyStep(action, reply) {
    const entry = { ...reply, action, timestamp: new Date().toISOString(), step_count: this.stepCount + 1 };
    this.apply({ type: "step", entry, render: null });
    this.setSession("ready", null);
  }

  /**
   * Note what became of the session.
   * @param {"none" | "ready" | "busy" | "lost"} state
   * @param {string | null} reason
   */
  setSession(state, reason) {
    if (state === "busy" && !this.isBusy) {
      this.busySince = performance.now();
      this.events = [];
      this.failure = null;
    }
    if (state === "none" || state === "lost") this.isOver = true;
    this.session = { state, reason };
    this.changed();
  }

  /** @param {{message: string, code: string} | null} failure */
  setFailure(failure) {
    this.failure = failure;
    this.changed();
  }

  /** @param {any} frame @param {number} size */
  #take(frame, size) {
    if (["hello", "reset", "step", "call"].includes(frame.type)) this.happenings += 1;
    switch (frame.type) {
      case "hello":
        return this.#hello(frame, size);
      case "reset":
        return this.#reset(frame);
      case "step":
        return this.#step(frame, size);
      case "call":
        return this.#append({ kind: "call", entry: frame.entry, size });
      case "session":
        return this.setSession(frame.state, frame.reason ?? null);
      case "event":
        return this.#event(frame);
      case "error":
        return this.setFailure({ message: String(frame.detail ?? "The step failed."), code: String(frame.code ?? "") });
    }
  }

  /** @param {any} hello @param {number} size */
  #hello(hello, size) {
    const episode = hello.episode ?? {};
    const log = Array.isArray(hello.log) ? hello.log : [];
    const hadOne = this.session.state === "ready" || this.session.state === "busy";
    this.events = [];
    if (
      hadOne &&
      !episode.is_reset &&
      log.length === 0 &&
      hello.session?.state !== "ready" &&
      hello.session?.state !== "busy"
    ) {
      const reason = hello.session?.reason ?? "the server no longer knows it";
      this.setSession("lost", reason);
      return;
    }
    this.#begin(episode.episode_id ?? null, { isSame: this.episodeId === (episode.episode_id ?? null) });
    this.seed = episode.seed ?? null;
    this.isReset = Boolean(episode.is_reset);
    this.observation = episode.current_observation ?? null;
    if (log.length === 0) this.first = this.observation;
    this.reward = episode.reward ?? null;
    this.done = Boolean(episode.done);
    const each = size / Math.max(log.length, 1);
    for (const entry of log) this.#append({ kind: "action" in entry ? "step" : "call", entry, size: each });
    this.stepCount = Math.max(episode.step_count ?? 0, this.stepCount);
    this.#setRender(hello.render);
    this.setSession(hello.session?.state ?? "none", hello.session?.reason ?? null);
  }

  /** @param {any} frame */
  #reset(frame) {
    this.#begin(frame.episode_id ?? null);
    this.seed = frame.seed ?? null;
    this.isReset = true;
    this.observation = this.first = frame.observation ?? null;
    this.reward = frame.reward ?? null;
    this.done = Boolean(frame.done);
    this.failure = null;
    this.#setRender(frame.render);
  }

  /** @param {any} frame @param {number} size */
  #step(frame, size) {
    const entry = frame.entry;
    if (this.isOver) this.#begin(null); // the first step of a session without a reset
    this.#append({ kind: "step", entry, size });
    this.observation = entry.observation;
    this.reward = entry.reward ?? null;
    this.done = Boolean(entry.done);
    this.failure = null;
    this.#setRender(frame.render);
  }

  /** @param {any} frame */
  #event(frame) {
    this.events.push({ data: frame.data, timestamp: frame.timestamp });
    if (this.events.length > MAX_EVENTS) this.events.shift();
  }

  /** @param {string | null} episodeId @param {{isSame?: boolean}} [options] - Whether its log is sent again. */
  #begin(episodeId, { isSame = false } = {}) {
    if (!isSame) this.past.add(this);
    this.episodeId = episodeId;
    this.seed = null;
    this.stepCount = 0;
    this.isReset = false;
    this.isOver = false;
    this.observation = this.first = null;
    this.reward = null;
    this.done = false;
    this.log = [];
    this.dropped = this.chars = 0;
    this.total = 0;
    this.#setRender(null);
  }

  /** @param {LogItem} item */
  #append(item) {
    this.log.push(item);
    if (item.kind === "step") {
      const { entry } = item;
      this.stepCount = Math.max(entry.step_count ?? 0, this.stepCount + 1); // some environments do not count
      entry.step_count = this.stepCount;
      this.total += Number(entry.reward ?? 0);
    }
    this.chars += item.size;
    while (this.log.length > MAX_LOG || (this.chars > MAX_LOG_CHARS && this.log.length > 1)) {
      this.chars -= this.log.shift()?.size ?? 0;
      this.dropped += 1;
    }
  }

  /** @param {Partial<Render> | null | undefined} render */
  #setRender(render) {
    this.render = { html: render?.html ?? null, actions: Array.isArray(render?.actions) ? render.actions : [] };
  }

  /** Note whether the server can be reached. @param {boolean} isConnected */
  setConnected(isConnected) {
    if (isConnected === this.isConnected) return;
    this.isConnected = isConnected;
    this.changed();
  }

  /** Call the subscribers. */
  changed() {
    this.version += 1;
    if (this.isScheduled) return;
    this.isScheduled = true;
    const notify = () => {
      this.isScheduled = false;
      for (const listener of this.listeners) listener();
    };
    if (document.hidden) setTimeout(notify, 50);
    else requestAnimationFrame(notify);
  }
}
