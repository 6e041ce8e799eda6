/**
 * Notices: the session is lost, a step failed, the connection is gone. Said where it is seen, with what can be done.
 */

import { el, fill } from "./element.js";

const FAILURES = new Map([
  ["EXECUTION_ERROR", "The environment failed"],
  ["CANCELLED", "Cancelled"],
]);

/** What became of the session or of the last step. */
export class Notices {
  /**
   * @param {import("./episode.js").Episode} episode
   * @param {() => void} reset
   */
  constructor(episode, reset) {
    this.episode = episode;
    this.reset = reset;
    this.shown = "";
    this.node = el("div.notices");
    episode.subscribe(() => this.#draw());
  }

  #draw() {
    const { session, failure } = this.episode;
    const text = JSON.stringify([session.state === "lost" && session.reason, failure]);
    if (text === this.shown && session.state !== "lost") return;
    if (text === this.shown && this.node.hasChildNodes()) return;
    this.shown = text;
    fill(this.node, session.state === "lost" && this.#lost(session.reason), failure && this.#failure(failure));
  }

  /** @param {string | null} reason */
  #lost(reason) {
    const why = reason ? `: ${reason.replace(/\.$/, "")}.` : ".";
    return el(
      "div.notice.is-warning",
      { role: "alert" },
      el(
        "p",
        {},
        el("strong", {}, "The session is lost"),
        why,
        " What you see is how it was. Reset begins a new episode.",
      ),
      el("button", { type: "button", on: { click: this.reset } }, "Reset"),
    );
  }

  /** @param {{message: string, code: string}} failure */
  #failure({ message, code }) {
    const needsReset = /\breset\b/i.test(message);
    return el(
      code === "CANCELLED" ? "div.notice" : "div.notice.is-error",
      { role: "alert" },
      el(
        "p",
        {},
        el("strong", {}, FAILURES.get(code) ?? "The request failed"),
        ": ",
        el("span.pre", {}, message),
        code && el("code", {}, code),
      ),
      needsReset && el("button", { type: "button", on: { click: this.reset } }, "Reset"),
      el("button", { type: "button", on: { click: () => this.episode.setFailure(null) } }, "Dismiss"),
    );
  }
}

/**
 * Say how the connection is, at the top of the page.
 * @param {HTMLElement} place
 * @param {import("./live.js").LiveStatus} status
 * @param {() => void} retry
 */
export function showConnection(place, status, retry) {
  clearInterval(Number(place.dataset.timer));
  place.hidden = status.state === "open" || status.state === "connecting";
  place.dataset.state = status.state;
  if (place.hidden) return;
  const left = el("span", { "aria-hidden": "true" });
  const count = () => {
    const seconds = Math.ceil((status.retryAt - performance.now()) / 1000);
    left.textContent = seconds > 0 ? `Next try in ${seconds} s.` : "";
  };
  count();
  place.dataset.timer = String(setInterval(count, 500));
  const text =
    status.state === "offline"
      ? "Connection lost, trying again."
      : "No live updates: the page shows only your own actions.";
  fill(place, el("span", {}, text), " ", left, el("button.link", { type: "button", on: { click: retry } }, "Try now"));
}
