/**
 * The player: resets, steps and calls in the visitor's session, one at a time, and what became of each.
 *
 * Knows requests and the episode. What happened comes as frames; where there are none, the reply itself is taken.
 */

import { api } from "./api.js";

const FRAME_WAIT_MS = 5000;

/** Acts for the visitor. */
export class Player {
  /**
   * @param {import("./episode.js").Episode} episode
   * @param {object} options
   * @param {() => boolean} options.isLive - Whether frames come.
   * @param {() => void} options.resync - Called when frames should have come and did not.
   * @param {(error: import("./api.js").ApiError) => boolean} options.refused - Takes an error, or says no.
   */
  constructor(episode, { isLive, resync, refused }) {
    this.episode = episode;
    this.isLive = isLive;
    this.resync = resync;
    this.refused = refused;
    this.isPending = false;
    this.canAct = true;
  }

  /** Whether a button may be pressed now. */
  get isFree() {
    return this.canAct && !this.isPending && !this.episode.isBusy;
  }

  /** @param {Record<string, any>} options */
  reset(options) {
    return this.#run(
      () => api.reset(options),
      (reply) => this.episode.applyReset(options, reply),
    );
  }

  /**
   * @param {any} action
   * @param {Record<string, any>} [body] - What is sent, where it is not the action itself.
   */
  step(action, body = { action }) {
    return this.#run(
      () => api.step(body),
      (reply) => this.episode.applyStep(action, reply),
    );
  }

  /**
   * @param {string} name
   * @param {Record<string, any>} args
   * @returns {Promise<{reply: any, error: any}>}
   */
  call(name, args) {
    return this.#run(
      () => api.call(name, args),
      (reply) => this.#noteCall(name, args, reply),
    );
  }

  /** Stop waiting for what runs, and end it as far as that is possible. */
  async cancel() {
    if (!this.canAct) return;
    await api.cancel().catch((error) => this.refused(error));
  }

  /** End the visitor's session, even if a step hangs in it. */
  async end() {
    if (!this.canAct) return;
    try {
      await api.close();
      this.episode.setSession("none", "ended");
    } catch (error) {
      this.#failed(/** @type {any} */ (error), this.episode.session);
    }
  }

  /**
   * @param {() => Promise<any>} request
   * @param {(reply: any) => void} apply
   * @returns {Promise<{reply: any, error: any}>}
   */
  async #run(request, apply) {
    if (!this.isFree) return { reply: null, error: null };
    const { episode } = this;
    const before = episode.session;
    const frames = episode.happenings;
    this.isPending = true;
    episode.setSession("busy", null);
    try {
      const reply = await request();
      if (!this.isLive()) apply(reply);
      else setTimeout(() => episode.happenings === frames && this.resync(), FRAME_WAIT_MS);
      return { reply, error: null };
    } catch (error) {
      this.#failed(/** @type {any} */ (error), before);
      return { reply: null, error };
    } finally {
      this.isPending = false;
      if (episode.isBusy) episode.setSession(before.state === "none" ? "ready" : before.state, null);
      episode.changed(); // the session may have been ready before this reply came
    }
  }

  /** @param {import("./api.js").ApiError} error @param {{state: any, reason: string | null}} before */
  #failed(error, before) {
    const { episode } = this;
    if (episode.isBusy) episode.setSession(before.state, before.reason);
    if (this.refused(error) || error.status === 422) return;
    if (error.code === "SESSION_LOST" || error.status === 410) {
      const wasEnded = error.reason === "closed"; // by this visitor, while the request waited
      episode.setSession(wasEnded ? "none" : "lost", wasEnded ? "ended" : error.reason || error.message);
      return;
    }
    const wait = error.retryAfter ? ` Try again in ${Math.ceil(error.retryAfter)} s.` : "";
    episode.setFailure({ message: `${error.message}${wait}`, code: error.code });
  }

  /** @param {string} name @param {Record<string, any>} args @param {any} reply */
  #noteCall(name, args, reply) {
    const entry = { timestamp: new Date().toISOString(), name, arguments: args, ...reply };
    this.episode.apply({ type: "call", entry });
  }
}
