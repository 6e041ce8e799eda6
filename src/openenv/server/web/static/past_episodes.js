/**
 * The logs of the page's earlier episodes, which a reset must not clear. The oldest go first when there are too many.
 */

const MAX_LOG = 1000;
const MAX_CHARS = 32_000_000;

/** @typedef {{episodeId: string | null, seed: any, total: number, log: import("./episode.js").LogItem[]}} PastEpisode */

/** Earlier episodes, the newest first. */
export class PastEpisodes {
  /** @type {PastEpisode[]} */
  list = [];

  /** The number of their actions. */
  get count() {
    return this.list.reduce((sum, { log }) => sum + log.length, 0);
  }

  /** Keep an episode that another one replaces, unless nothing was done in it. @param {PastEpisode} episode */
  add({ episodeId, seed, total, log }) {
    if (log.length === 0) return;
    let items = 0;
    let chars = 0;
    this.list = [{ episodeId, seed, total, log }, ...this.list].filter(({ log }, index) => {
      items += log.length;
      chars += log.reduce((sum, item) => sum + item.size, 0);
      return index === 0 || (items <= MAX_LOG && chars <= MAX_CHARS);
    });
  }
}
