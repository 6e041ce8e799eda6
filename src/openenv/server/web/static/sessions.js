/**
 * Sessions: who uses the server now, for operators. Asked for every two seconds while it is looked at.
 */

import { api } from "./api.js";
import { el, fill, focusOn } from "./element.js";
import { pageAddress, pagePlace } from "./places.js";
import { formatSeconds } from "./values.js";
import { Watch } from "./watch.js";

const EVERY_MS = 2000;
const MOST_SHOWN = 200;

/** The table of sessions. */
export class Sessions {
  /**
   * @param {object} options
   * @param {boolean} options.canAct - Whether sessions may be ended and watched.
   * @param {boolean} options.canWatch - Whether there is anything to watch.
   * @param {(error: any) => boolean} options.refused
   */
  constructor({ canAct, canWatch, refused }) {
    this.canEnd = canAct;
    this.canWatch = canAct && canWatch;
    this.refused = refused;
    this.timer = 0;
    this.isShown = false;
    /** @type {string | null} */
    this.asked = null;
    this.meter = el("meter", { min: 0, max: 1, "aria-label": "Sessions in use" });
    this.capacity = el("p.capacity", { role: "status" });
    this.problem = el("p.problem", { hidden: true, role: "alert" });
    this.rows = el("tbody");
    const titles = ["Session", "State", "Opened by", "Episode", "Steps", "Age", "Idle", ""].map((title) =>
      el("th", { scope: "col" }, title || el("span.unseen", {}, "Actions")),
    );
    this.table = el(
      "table.log",
      {},
      el("caption.unseen", {}, "Sessions on this server"),
      el("thead", {}, el("tr", {}, titles)),
      this.rows,
    );
    this.empty = el("p.empty-line", {}, "No open sessions.");
    const head = el("div.toolbar", {}, this.capacity, this.meter);
    this.watch = new Watch({ refused });
    this.node = el(
      "div.stack.is-tight",
      {},
      this.watch.node,
      el(
        "section.card",
        {},
        el("h2.unseen", {}, "Sessions"),
        head,
        this.problem,
        this.empty,
        el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Table of sessions" }, this.table),
      ),
    );
    addEventListener("hashchange", () => this.isShown && this.#route());
  }

  /** Watch the session that the address names, if it names one. */
  #route() {
    const { tab, parts } = pagePlace(location.hash);
    this.watch.show(this.canWatch && this.isShown && tab === "sessions" ? (parts[0] ?? null) : null);
  }

  /** @param {boolean} isShown */
  show(isShown) {
    this.isShown = isShown;
    clearTimeout(this.timer);
    this.#route();
    if (isShown) this.#refresh();
  }

  async #refresh() {
    clearTimeout(this.timer);
    if (!document.hidden) await this.#ask();
    clearTimeout(this.timer);
    if (this.isShown) this.timer = window.setTimeout(() => this.#refresh(), EVERY_MS);
  }

  async #ask() {
    try {
      this.#draw(await api.sessions());
      this.problem.hidden = true;
    } catch (error) {
      if (this.refused(error)) return;
      this.problem.textContent = /** @type {Error} */ (error).message;
      this.problem.hidden = false;
    }
  }

  /** @param {any} answer */
  #draw({ capacity, sessions }) {
    const queued = capacity.queued ? `, ${capacity.queued} waiting` : "";
    const draining = capacity.draining ? ", the server is shutting down" : "";
    this.capacity.textContent = `${capacity.active} of ${capacity.max} in use${queued}${draining}`;
    this.meter.max = Math.max(capacity.max, 1);
    this.meter.value = capacity.active;
    this.empty.hidden = sessions.length > 0;
    this.table.hidden = sessions.length === 0;
    const focused = document.activeElement?.closest("tr[data-session]")?.getAttribute("data-session");
    fill(
      this.rows,
      sessions.slice(0, MOST_SHOWN).map((/** @type {any} */ session) => this.#row(session)),
    );
    if (focused) focusOn(this.rows, `tr[data-session="${CSS.escape(focused)}"] button`);
  }

  /** @param {any} session */
  #row(session) {
    const id = String(session.session_id);
    return el(
      "tr",
      { data: { session: id } },
      el(
        "td.mono",
        { title: id },
        id.length > 13 ? `${id.slice(0, 12)}…` : id,
        session.is_mine && el("span.badge", {}, "yours"),
      ),
      el("td", {}, session.state),
      el("td", {}, session.opened_by ?? session.kind ?? ""),
      el("td.mono", { title: session.episode_id ?? "" }, String(session.episode_id ?? "–").slice(0, 12)),
      el("td.number", {}, session.step_count ?? 0),
      el("td.number", {}, formatSeconds(session.age_s)),
      el("td.number", {}, formatSeconds(session.idle_s)),
      el(
        "td.number.row-actions",
        {},
        this.canWatch && el("a.button.small", { href: pageAddress("sessions", [id]), title: `Watch ${id}` }, "Watch"),
        this.canEnd && this.#endButton(id),
      ),
    );
  }

  /** @param {string} id */
  #endButton(id) {
    const isAsked = this.asked === id;
    const label = isAsked ? "End this session?" : "End";
    const button = el(
      isAsked ? "button.small.danger" : "button.small",
      { type: "button", "aria-label": `${label} (session ${id})` },
      label,
    );
    button.addEventListener("click", async () => {
      this.asked = isAsked ? null : id;
      if (isAsked) await api.endSession(id).catch((error) => this.refused(error));
      await this.#ask();
      focusOn(this.rows, ".danger");
    });
    button.addEventListener("blur", () => {
      if (isAsked && button.isConnected) this.asked = null;
    });
    return button;
  }
}
