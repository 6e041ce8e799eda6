/**
 * The page: lets the visitor in, learns what the environment is, and puts the parts together.
 */

import { aboutNode } from "./about.js";
import { ApiError, address, api } from "./api.js";
import { el, fill } from "./element.js";
import { Episode } from "./episode.js";
import { Episodes } from "./episodes.js";
import { Header } from "./header.js";
import { History } from "./history.js";
import { listenToKeys } from "./keyboard.js";
import { Live } from "./live.js";
import { askForToken, isAboutVisitor, letIn } from "./login.js";
import { showConnection } from "./notices.js";
import { pageAddress, pagePlace } from "./places.js";
import { Play } from "./play.js";
import { Player } from "./player.js";
import { Sessions } from "./sessions.js";
import { Tabs } from "./tabs.js";
import { namePlate } from "./theme.js";
import { Tools } from "./tools.js";

const RETRY_MS = 3000;
const place = /** @type {HTMLElement} */ (document.querySelector("#app"));
const connection = /** @type {HTMLElement} */ (document.querySelector("#connection"));

/** The page of one visitor who was let in. */
class Application {
  /** @param {any} page */
  constructor(page) {
    this.page = page;
    this.episode = new Episode();
    this.live = new Live({
      frame: (frame, size) => this.episode.apply(frame, size),
      probe: () => api.page().then(() => {}),
      status: (status) => {
        showConnection(connection, status, () => this.live.retry());
        this.episode.setConnected(status.state === "open" || status.state === "connecting");
      },
      refused: (error) => this.refused(error),
    });
    this.player = new Player(this.episode, {
      isLive: () => this.live.isOpen,
      resync: () => this.live.reopen(),
      refused: (error) => this.refused(error),
    });
    this.player.canAct = page.role !== "observer";
    this.header = new Header(page, this.player, {
      onOptions: () => this.play.refreshSource(),
      onLogout: () => this.#logout(),
    });
    this.play = new Play(page, this.player, this.header);
    this.tabs = this.#tabs();
    this.stopKeys = listenToKeys({
      submit: () => this.#submit(),
      // Only where the new episode is seen: elsewhere a stray key would end the episode that is being read.
      reset: () => this.tabs.chosen === "play" && this.player.canAct && this.header.reset(),
      press: (digit) => this.tabs.chosen === "play" && this.play.action.moves.press(digit),
      arrow: (key) => this.tabs.chosen === "play" && this.play.action.moves.arrow(key),
    });
    this.moved = () => this.tabs.has(pagePlace(location.hash).tab) && this.tabs.select(pagePlace(location.hash).tab);
    addEventListener("hashchange", this.moved);
    document.title = page.title || page.name;
    const isAlone = page.custom_tab?.only;
    const plate = namePlate({ version: page.openenv_version, docs: page.docs_url });
    fill(place, !isAlone && plate, !isAlone && this.header.node, !isAlone && this.tabs.list, this.tabs.body);
    document.body.classList.toggle("is-alone", Boolean(isAlone));
    this.live.open();
  }

  /**
   * Take errors that concern the visitor and not the call: a token that is no longer good.
   * @param {any} error
   */
  refused(error) {
    if (isAboutVisitor(error)) this.close();
    return askForToken(place, error, { onDone: start });
  }

  close() {
    this.live.close();
    this.header.close();
    this.stopKeys();
    removeEventListener("hashchange", this.moved);
    connection.hidden = true;
    for (const tab of this.tabs.tabs) tab.onShow?.(false);
  }

  #tabs() {
    const { page } = this;
    const history = new History(this.episode, { name: page.name, reuse: (action) => this.#reuse(action) });
    const sessions = new Sessions({
      canAct: page.role !== "observer",
      canWatch: page.mode !== "production",
      refused: (error) => this.refused(error),
    });
    const episodes = new Episodes({ refused: (error) => this.refused(error) });
    this.tools = page.tools
      ? new Tools(page.tools, this.player, {
          needsToken: page.asks_for_token,
          canReset: page.mode !== "production",
          hasRollouts: page.has_rollouts,
        })
      : null;
    const custom = page.custom_tab && { id: "custom", title: page.custom_tab.name, node: customNode(page.custom_tab) };
    const canPlay = page.mode !== "production";
    const standard = [
      canPlay && { id: "play", title: "Play", node: this.play.node },
      this.tools && { id: "tools", title: "Tools", node: this.tools.node },
      {
        id: "history",
        title: "History",
        node: history.node,
        onShow: (/** @type {boolean} */ isShown) => history.show(isShown),
      },
      canPlay && {
        id: "episodes",
        title: "Episodes",
        node: episodes.node,
        onShow: (/** @type {boolean} */ isShown) => episodes.show(isShown),
      },
      {
        id: "sessions",
        title: "Sessions",
        node: sessions.node,
        onShow: (/** @type {boolean} */ isShown) => sessions.show(isShown),
      },
      page.has_rollouts && this.#rollouts(),
      { id: "about", title: "About", node: aboutNode(page) },
    ].filter(Boolean);
    const all =
      custom?.id && page.custom_tab.only
        ? [custom]
        : page.custom_tab?.primary
          ? [custom, ...standard]
          : [...standard, custom];
    const isFirst = page.custom_tab?.primary || page.custom_tab?.only;
    const usual = isFirst ? "custom" : page.role === "observer" ? "sessions" : canPlay ? "play" : "tools";
    const { tab } = pagePlace(location.hash);
    const tabs = /** @type {any[]} */ (all.filter(Boolean));
    return new Tabs(tabs, tabs.some(({ id }) => id === tab) ? tab : usual, {
      onSelect: (id) => {
        // Those with addresses of their own have set one when they were shown.
        if (pagePlace(location.hash).tab !== id) window.history.pushState(null, "", pageAddress(id));
      },
    });
  }

  /** The tab of rollouts; what shows them is loaded with its first visit. */
  #rollouts() {
    const node = el("div", {}, el("p.hint", {}, "Loading…"));
    /** @type {Promise<import("./rollouts.js").Rollouts> | null} */
    let loading = null;
    const onShow = async (/** @type {boolean} */ isShown) => {
      if (!isShown && loading === null) return;
      loading ??= import("./rollouts.js").then(({ Rollouts }) => {
        const rollouts = new Rollouts({ refused: (error) => this.refused(error) });
        fill(node, rollouts.node);
        return rollouts;
      });
      (await loading).show(isShown && this.tabs?.chosen === "rollouts");
    };
    return { id: "rollouts", title: "Rollouts", node, onShow };
  }

  #submit() {
    if (!this.player.canAct) return;
    if (this.tabs.chosen === "tools") this.tools?.submit();
    else if (this.tabs.chosen === "play") this.play.submit();
  }

  /** @param {any} action */
  #reuse(action) {
    this.tabs.select("play");
    this.play.action.write(action);
  }

  async #logout() {
    await api.logout().catch(() => {});
    this.close();
    sessionStorage.removeItem("openenv-reloads"); // `boot` counts how often it has tried
    start();
  }
}

/** @param {{name: string, href: string}} tab */
function customNode(tab) {
  return el("iframe.custom", { src: address(tab.href).href, title: tab.name });
}

/** Show the page; ask for a token where that is needed. */
function start() {
  letIn(place, { show: (page) => new Application(page), fail: showFailure });
}

/** Say that there is nothing to show, and try again. @param {ApiError} error */
function showFailure(error) {
  const timer = setTimeout(start, RETRY_MS);
  const retry = () => {
    clearTimeout(timer);
    start();
  };
  const card = el(
    "div.card.login",
    {},
    el("h1", {}, "The environment cannot be shown"),
    el("p", { role: "alert" }, error.message),
    el("button.primary", { type: "button", on: { click: retry } }, "Try again"),
  );
  fill(place, el("main.centre", { id: "content" }, card));
}

sessionStorage.removeItem("openenv-reloads"); // `boot` counts how often it has tried
start();
