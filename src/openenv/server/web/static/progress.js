/**
 * What is going on while a step runs: for how long, and what the environment reports meanwhile.
 */

import { el, fill, icon } from "./element.js";
import { formatNumber, formatSeconds, formatTime, shortJson } from "./values.js";

const SHOW_AFTER_MS = 350;
const CANCEL_AFTER_MS = 1000;
const TICK_MS = 100;
const MOST_SHOWN = 50;

/** A line with the elapsed time, and the events below it. */
export class Progress {
  /** @param {import("./player.js").Player} player */
  constructor(player) {
    const { episode } = player;
    this.episode = episode;
    this.cancel = el(
      "button.small",
      { type: "button", hidden: true, on: { click: () => player.cancel() } },
      icon("cross"),
      "Cancel",
    );
    this.elapsed = el("span.elapsed", {});
    this.line = el(
      "p.working",
      { hidden: true },
      el("span.spinner", { "aria-hidden": "true" }),
      el("span", {}, "Working"),
      this.elapsed,
      this.cancel,
    );
    this.bar = el("progress", { hidden: true, "aria-label": "Progress" });
    this.list = el("ol.events", { role: "log", "aria-label": "Events of the running step", tabindex: 0, hidden: true });
    this.node = el("div.progress", {}, this.line, this.bar, this.list);
    this.timer = 0;
    this.drawn = -1;
    /** @type {any} */
    this.last = null;
    episode.subscribe(() => this.#update());
  }

  #update() {
    const { isBusy } = this.episode;
    if (isBusy && !this.timer) this.timer = window.setInterval(() => this.#tick(), TICK_MS);
    if (!isBusy && this.timer) {
      clearInterval(this.timer);
      this.timer = 0;
    }
    this.#tick();
    this.#events();
  }

  #tick() {
    const { isBusy, busySince } = this.episode;
    const ms = performance.now() - busySince;
    this.line.hidden = !isBusy || ms < SHOW_AFTER_MS;
    this.cancel.hidden = ms < CANCEL_AFTER_MS;
    if (!this.line.hidden) this.elapsed.textContent = formatSeconds(ms / 1000);
  }

  #events() {
    const { events, isBusy } = this.episode;
    const last = events.at(-1) ?? null;
    const data = last?.data;
    const hasShare = isBusy && typeof data?.progress === "number" && typeof data?.total === "number" && data.total > 0;
    this.bar.hidden = !hasShare;
    if (hasShare) {
      this.bar.max = data.total;
      this.bar.value = data.progress;
    }
    if (last === this.last && events.length === this.drawn) return;
    this.last = last;
    this.drawn = events.length;
    this.list.hidden = events.length === 0;
    fill(this.list, events.slice(-MOST_SHOWN).map(line));
    this.list.scrollTop = this.list.scrollHeight;
  }
}

/** @param {{data: any, timestamp: string}} event */
function line({ data, timestamp }) {
  return el("li", {}, el("time", {}, formatTime(timestamp)), el("span", {}, eventText(data)));
}

/** How far it is: a count where both are whole, else a percentage. @param {number} progress @param {any} total */
function shareText(progress, total) {
  if (typeof total !== "number" || !(total > 0)) return formatNumber(Number(progress.toPrecision(3)));
  if (Number.isInteger(progress) && Number.isInteger(total)) return `${progress} of ${total}`;
  return `${Math.round((100 * progress) / total)} %`;
}

/** @param {any} data */
function eventText(data) {
  const share = typeof data?.progress === "number" ? shareText(data.progress, data.total) : "";
  if (data?.event === "log") return `${data.level ?? "log"}: ${shortJson(data.data, 400)}`;
  const message = typeof data?.message === "string" ? data.message : "";
  return [share, message].filter(Boolean).join(" · ") || shortJson(data, 400);
}
