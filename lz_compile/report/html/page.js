"use strict";
const search = document.getElementById("search"), found = document.getElementById("found");
let items = [], nodes = [], bodies = [], opened = null;
const COLOURS = { "#": "#1c8f5f", "+": "#8fd0b4", "?": "#e0a63c", "|": "#e0a63c", ".": "#e9ebef" };

function remember(name, value) { try { localStorage.setItem(name, value); } catch { /* files may have no storage */ } }
function recall(name) { try { return localStorage.getItem(name); } catch { return null; } }
function setTheme(isDark) { document.documentElement.classList.toggle("dark", isDark); }
function changeTheme() {
  const isDark = !document.documentElement.classList.contains("dark");
  setTheme(isDark);
  remember("lz-theme", isDark ? "dark" : "light");
}

// A large page is packed. What is behind an item's summary is put in when the item is opened.
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.content.textContent.trim()), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const told = JSON.parse(await new Response(stream).text());
  document.querySelector("main").innerHTML = told.main;
  bodies = told.bodies;
}
function fill(item) {
  for (const later of item.querySelectorAll(".later")) {
    const body = document.createElement("template");
    body.innerHTML = bodies[later.dataset.body];
    later.replaceWith(body.content);
  }
}

// A mask: one square for each character, drawn when its match is opened.
function draw(pre) {
  const rows = pre.textContent.split("\n"), side = Math.max(4, Math.floor(240 / Math.max(rows.length, rows[0].length)));
  const canvas = document.createElement("canvas");
  canvas.width = rows[0].length * side;
  canvas.height = rows.length * side;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", pre.getAttribute("aria-label"));
  const pen = canvas.getContext("2d");
  rows.forEach((row, y) => [...row].forEach((cell, x) => {
    pen.fillStyle = COLOURS[cell] || "#fff";
    pen.fillRect(x * side, y * side, cell === "|" ? Math.ceil(side / 2) : side, side);
  }));
  pre.replaceWith(canvas);
}
document.addEventListener("toggle", (event) => {
  if (!event.target.open || event.target.classList.contains("node")) return;
  fill(event.target);
  event.target.querySelectorAll("pre.picture").forEach(draw);
}, true);

// From an operation in the tree to what is told of it, with the place that was asked about marked.
function show(id, place) {
  const item = document.getElementById(id);
  if (!item) return;
  item.classList.remove("hidden");
  item.open = true;
  fill(item);
  document.querySelectorAll(".here").forEach((each) => each.classList.remove("here"));
  select(item);
  document.querySelectorAll(".from").forEach((each) => each.remove());
  for (const each of item.querySelectorAll(".places li")) {
    if (place === undefined || each.dataset.module !== place) continue;
    each.classList.add("here");
    each.parentElement.scrollTop = each.offsetTop - each.parentElement.offsetTop;
    if (each.parentElement.children.length < 2) break;
    const from = document.createElement("p");
    from.className = "from";
    from.textContent = `You came from ${each.querySelector("b").textContent}. The same holds in every place that is listed below.`;
    item.querySelector("summary").after(from);
    break;
  }
}
function select(item) {
  document.querySelectorAll(".selected").forEach((each) => each.classList.remove("selected"));
  item.classList.add("selected");
  item.scrollIntoView({ block: "start" });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.op");
  if (!link) return;
  event.preventDefault();
  history.replaceState(null, "", link.getAttribute("href"));
  show(link.getAttribute("href").slice(1), link.dataset.place);
});

// Words are looked for in what is told, and in the tree with everything around what is found.
function look() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (text) => words.every((word) => text.includes(word));
  let count = 0;
  for (const item of items) {
    const isIn = !words.length || fits(item.dataset.text + " " + (item.querySelector("summary") || item).textContent.toLowerCase());
    item.classList.toggle("hidden", !isIn);
    count += isIn;
  }
  for (const part of document.querySelectorAll("main section, #changes table")) {
    const inside = [...part.querySelectorAll(".item")];
    part.classList.toggle("hidden", words.length > 0 && inside.every((item) => item.classList.contains("hidden")));
  }
  if (words.length && !opened) opened = new Set(nodes.filter((node) => node.open));
  for (const node of nodes) {
    node.classList.toggle("hidden", words.length > 0);
    if (!words.length && opened && node.tagName === "DETAILS") node.open = opened.has(node);
  }
  if (!words.length) opened = null;
  if (words.length) {
    for (const node of nodes) {
      if (!node.dataset.text || !fits(node.dataset.text)) continue;
      for (let up = node; up && up.tagName !== "ASIDE"; up = up.parentElement) {
        if (up.classList.contains("node")) { up.classList.remove("hidden"); if (up.tagName === "DETAILS") up.open = true; }
      }
      node.querySelectorAll(".node").forEach((each) => each.classList.remove("hidden"));
    }
  }
  found.textContent = words.length ? `${count} of ${items.length} entries${count ? "" : ": all words have to be in one; try fewer"}` : "";
}

// Of several entries the one is meant that has the most of the words: in its operation, and whole ones in its layers.
function parts(item) { return new Set(item.dataset.text.split(/[^a-z0-9_]+/)); }
function showFirst() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const said = (item) => words.filter((word) => item.querySelector("summary b").textContent.includes(word) || parts(item).has(word)).length;
  const seen = items.filter((item) => item.tagName === "DETAILS" && item.id && !item.classList.contains("hidden"));
  const first = seen.reduce((best, item) => (best && said(best) >= said(item) ? best : item), null);
  if (first) show(first.id);
}
function move(step) {
  const seen = items.filter((item) => item.tagName === "DETAILS" && !item.classList.contains("hidden"));
  if (!seen.length) return;
  const at = seen.findIndex((item) => item.classList.contains("selected"));
  const next = seen[Math.min(seen.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
  select(next);
  const summary = next.querySelector("summary");
  if (summary) summary.focus({ preventScroll: true });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { search.value = ""; look(); search.blur(); return; }
  if (event.target === search) {
    if (event.key === "Enter") showFirst();
    return;
  }
  const act = { "/": () => search.focus(), j: () => move(1), k: () => move(-1), t: changeTheme }[event.key];
  if (act) { event.preventDefault(); act(); }
});

search.addEventListener("input", look);
document.getElementById("theme").addEventListener("click", changeTheme);
document.getElementById("all").addEventListener("click", (event) => {
  const opens = event.target.textContent === "Open all";
  document.querySelectorAll("details").forEach((each) => { if (opens || each.classList.contains("item")) each.open = opens; });
  event.target.textContent = opens ? "Close all" : "Open all";
});
setTheme((recall("lz-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark");

async function begin() {
  const packed = document.getElementById("packed");
  try {
    if (packed) await unpack(packed);
  } catch (error) {
    const text = "This browser cannot unpack the page. Take a newer one (of 2023 or later), or read the report's JSON.";
    document.getElementById("unpacking").textContent = `${text} (${error})`;
    return;
  }
  items = [...document.querySelectorAll(".item")];
  nodes = [...document.querySelectorAll("aside .node")];
  document.documentElement.dataset.ready = "yes";
  if (location.hash) show(location.hash.slice(1));
}
begin();
