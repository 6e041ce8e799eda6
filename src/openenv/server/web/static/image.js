/**
 * Images: which values are one, and how they are shown.
 *
 * Environments send images as data addresses, as base64 of a file, or as nested lists of pixels. Nothing is ever loaded
 * from an address.
 */

import { el } from "./element.js";
import { isRecord } from "./schema.js";

const MAGIC = [
  ["iVBORw0KGgo", "image/png"],
  ["/9j/", "image/jpeg"],
  ["R0lGOD", "image/gif"],
  ["UklGR", "image/webp"],
];
const LEAST_SIDE = 16;
const MOST_PIXELS = 4_000_000;
const SHOWN_WIDTH = 320;

/**
 * Return the element that shows a value as an image, or null if it is none.
 * @param {any} value
 * @param {string} name
 * @returns {HTMLElement | null}
 */
export function imageOf(value, name) {
  const source = sourceOf(value);
  if (source) return el("figure.picture", {}, el("img", { src: source, alt: name }));
  const size = pixelSize(value);
  return size ? el("figure.picture", {}, drawn(value, size, name)) : null;
}

/**
 * Return the data address of an image that a value contains.
 * @param {any} value
 * @returns {string | null}
 */
export function sourceOf(value) {
  if (isRecord(value)) {
    if (value.type !== "image" || typeof value.data !== "string") return null;
    const type = /^image\/[\w.+-]+$/.test(String(value.mimeType)) ? value.mimeType : "image/png";
    return `data:${type};base64,${standard(value.data)}`;
  }
  if (typeof value !== "string") return null;
  if (/^data:image\/[\w.+-]+[;,]/.test(value)) return value;
  if (value.length < 64 || !/^[\w+/=-]+$/.test(value.slice(0, 200))) return null;
  const base64 = standard(value);
  const found = MAGIC.find(([magic]) => base64.startsWith(magic));
  return found ? `data:${found[1]};base64,${base64}` : null;
}

/** @param {string} base64 */
function standard(base64) {
  return base64.replace(/-/g, "+").replace(/_/g, "/");
}

/** @typedef {{width: number, height: number, channels: number}} PixelSize */

/**
 * Say how large an image of nested lists is, or null if it is none: rows of grey values or of colours.
 * @param {any} value
 * @returns {PixelSize | null}
 */
function pixelSize(value) {
  if (!Array.isArray(value) || value.length < LEAST_SIDE || !Array.isArray(value[0])) return null;
  const height = value.length;
  const width = value[0].length;
  if (width < LEAST_SIDE || height * width > MOST_PIXELS) return null;
  if (!value.every((row) => Array.isArray(row) && row.length === width)) return null;
  const first = value[0][0];
  const channels = Array.isArray(first) ? first.length : 0;
  if (![0, 1, 3, 4].includes(channels)) return null;
  const isByte = (/** @type {any} */ part) => typeof part === "number" && part >= 0 && part <= 255;
  const isPixel = (/** @type {any} */ pixel) =>
    channels === 0 ? isByte(pixel) : Array.isArray(pixel) && pixel.length === channels && pixel.every(isByte);
  return value.every((row) => row.every(isPixel)) ? { width, height, channels } : null;
}

/** @param {any[]} rows @param {PixelSize} size @param {string} name */
function drawn(rows, { width, height, channels }, name) {
  const flat = rows.flat(2);
  const most = flat.reduce((most, part) => Math.max(most, part), 0);
  const scale = most > 0 && most <= 1 ? 255 : 1; // shares of one, or bytes
  const canvas = el("canvas.pixels", { width, height, role: "img", "aria-label": name });
  const image = new ImageData(width, height);
  const step = Math.max(channels, 1);
  for (let pixel = 0; pixel < width * height; pixel += 1) {
    const at = pixel * step;
    const isGrey = step === 1;
    image.data[pixel * 4] = flat[at] * scale;
    image.data[pixel * 4 + 1] = flat[isGrey ? at : at + 1] * scale;
    image.data[pixel * 4 + 2] = flat[isGrey ? at : at + 2] * scale;
    image.data[pixel * 4 + 3] = step === 4 ? flat[at + 3] * scale : 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.width = `${Math.max(width, SHOWN_WIDTH)}px`;
  return canvas;
}
