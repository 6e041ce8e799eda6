/**
 * The head of the page: what this environment is, how the session is, and the buttons that begin and end one.
 */

import { el, fill, focusOn, icon } from "./element.js";
import { Form } from "./form.js";
import { isRecord, labelOf, withoutDefaults } from "./schema.js";
import { withCode } from "./texts.js";
import { formatSeconds, shortJson } from "./values.js";

/** What is over sooner is not worth a word. */
const QUICK_S = 0.4;
const SEEDS = 1_000_000;

/** Name, session and resets. */
export class Header {
  /**
   * @param {any} page
   * @param {import("./player.js").Player} player
   * @param {object} options
   * @param {() => void} options.onOptions - Called when the options of the next reset change.
   * @param {() => void} options.onLogout
   */
  constructor(page, player, { onOptions, onLogout }) {
    this.player = player;
    this.schema = page.reset?.schema ?? { type: "object", properties: {} };
    this.form = new Form(this.schema, {
      label: "Reset",
      onChange: () => this.#optionsChanged(onOptions),
      onSubmit: () => this.reset(),
    });
    this.hasOptions = !this.form.isEmpty;
    this.takesSeeds = "seed" in (this.schema.properties ?? {});
    this.said = el("span", { role: "status" });
    this.elapsed = el("span", { "aria-hidden": "true" }); // a screen reader must not announce each second
    this.chip = el("span.chip", {}, this.said, this.elapsed);
    this.resetButton = el(
      "button",
      { type: "button", title: "Begin a new episode", on: { click: () => this.reset() } },
      icon("reset"),
      "Reset",
      el("kbd", { "aria-hidden": "true" }, "R"),
    );
    this.summary = el("span.reset-summary", {});
    this.unfold = el(
      "button.unfold",
      {
        type: "button",
        title: "Seed and options",
        "aria-label": "Seed and options",
        "aria-expanded": "false",
        "aria-controls": "reset-panel",
        on: { click: () => this.#fold(Boolean(this.panel.hidden)) },
      },
      icon("down"),
    );
    this.endButton = el("button", { type: "button", on: { click: () => player.end() } }, "End session");
    const begin = el(
      "button",
      { type: "button", on: { click: () => this.reset() } },
      icon("reset"),
      "Reset with these",
    );
    const clear = el("button", { type: "button", on: { click: () => this.form.write({}) } }, "Clear");
    this.panel = el(
      "section.card.reset-panel",
      { id: "reset-panel", hidden: true, "aria-label": "Seed and options of a reset" },
      el("div.card-head", {}, el("h2", {}, "Seed and options"), this.form.toggle),
      this.form.node,
      el("div.actions", {}, begin, clear),
    );
    const canPlay = page.role !== "observer" && page.mode !== "production";
    const canAct = page.role !== "observer";
    const logout = page.asks_for_token && el("button.link", { type: "button", on: { click: onLogout } }, "Log out");
    const buttons = canAct
      ? [canPlay && el("span.split", {}, this.resetButton, this.hasOptions && this.unfold), this.endButton]
      : [el("span.badge", { title: "This token is read-only" }, icon("eye"), "observer")];
    this.node = el(
      "header.head",
      {},
      el(
        "div.title",
        {},
        el(
          "h1",
          {},
          headline(page),
          page.mode === "production" && el("span.badge", {}, "production"),
          page.version && el("span.version", {}, `v${page.version}`),
        ),
        page.description && el("p.description", {}, withCode(page.description)),
      ),
      el("div.controls", {}, this.chip, this.summary, buttons, logout),
      this.panel,
    );
    player.episode.subscribe(() => this.#update());
    this.#tick = setInterval(() => this.#update(), 500);
  }

  /** @type {ReturnType<typeof setInterval>} */
  #tick;

  /** What a reset is asked for; what is as it would be anyway is left out. @returns {Record<string, any>} */
  get options() {
    const value = this.form.peek();
    return isRecord(value) ? withoutDefaults(value, this.schema) : {};
  }

  /** Begin a new episode. @returns {Promise<any>} What went wrong, if anything. */
  async reset() {
    const read = this.form.read();
    if (!read) return this.#fold(true);
    if (!isRecord(read.value)) return this.form.showErrors([{ loc: [], msg: "The options must be an object." }]);
    const options = withoutDefaults(read.value, this.schema);
    const drawn = this.#draw(options);
    let { error } = await this.player.reset({ ...drawn, ...options });
    if (error && "seed" in drawn && /\bseed/i.test(error.message)) {
      this.takesSeeds = false; // the environment declares a seed and refuses it
      ({ error } = await this.player.reset(options));
    }
    if (error?.problems?.length) {
      this.#fold(true);
      this.form.showErrors(error.problems);
    }
    return error;
  }

  /** Draw a seed if none was chosen, so that the recorded episode can be played again. @param {Record<string, any>} options */
  #draw(options) {
    if (!this.takesSeeds || "seed" in options) return {};
    return { seed: crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS };
  }

  /** Begin a new episode, with further options that are kept if it works. @param {Record<string, any>} options */
  async resetWith(options) {
    const before = this.form.peek();
    this.form.write({ ...before, ...options });
    if (await this.reset()) this.form.write(before);
  }

  /** Stop what runs by itself. */
  close() {
    clearInterval(this.#tick);
  }

  /** @param {boolean} isOpen */
  #fold(isOpen) {
    this.panel.hidden = !isOpen;
    this.unfold.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) focusOn(this.panel, "input, textarea, select");
  }

  /** @param {() => void} onOptions */
  #optionsChanged(onOptions) {
    const options = Object.entries(this.options);
    fill(
      this.summary,
      options.length > 0 &&
        el(
          "span",
          {},
          options.map(([name, value]) => `${labelOf(name, {}).toLowerCase()} ${shortJson(value, 16)}`).join(", "),
        ),
    );
    onOptions();
  }

  #update() {
    const { session, busySince, isReset, isConnected, failure, done } = this.player.episode;
    const seconds = (performance.now() - busySince) / 1000;
    const isQuick = session.state === "busy" && seconds < QUICK_S;
    const state = pillState(isQuick ? "ready" : session.state, { isConnected, hasFailed: failure !== null, done });
    const texts = {
      none: isReset ? "session ended" : "no session",
      ready: "session ready",
      busy: "working",
      lost: "session lost",
      offline: "not connected",
      failed: "step failed",
      over: "episode over",
    };
    this.chip.dataset.state = state;
    if (this.said.textContent !== texts[state]) this.said.textContent = texts[state];
    this.elapsed.textContent = state === "busy" && seconds > 1 ? formatSeconds(Math.floor(seconds)) : "";
    const { isFree } = this.player;
    this.resetButton.setAttribute("aria-disabled", String(!isFree));
    // One primary button at a time: this one where a new episode is what comes next.
    const isNext = isReset && (done || session.state === "lost" || session.state === "none");
    this.resetButton.classList.toggle("primary", isNext);
    this.unfold.classList.toggle("primary", isNext);
    this.endButton.hidden = session.state !== "ready" && session.state !== "busy";
  }
}

/**
 * What the pill shows: the same as the notices on the page.
 * @param {"none" | "ready" | "busy" | "lost"} state
 * @param {{isConnected: boolean, hasFailed: boolean, done: boolean}} episode
 * @returns {"none" | "ready" | "busy" | "lost" | "offline" | "failed" | "over"}
 */
function pillState(state, { isConnected, hasFailed, done }) {
  if (!isConnected) return "offline";
  if (state !== "ready") return state;
  return hasFailed ? "failed" : done ? "over" : "ready";
}

/**
 * The environment's name as a headline: the application's title, or the name in words.
 * @param {any} page
 */
function headline(page) {
  const name = String(page.name ?? "");
  if (page.title && !String(page.title).endsWith(`: ${name}`)) return page.title;
  const words = name.replace(/[_-](env|environment)$/i, "").replace(/([a-z\d])([A-Z])/g, "$1 $2");
  return labelOf(words, {}) || "Environment";
}
