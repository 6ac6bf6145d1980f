"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));
  for (const form of all("form")) form.addEventListener("submit", (event) => event.preventDefault());

  // Find a rank: whatever names it is marked.
  const holds = (spans, rank) => spans.split(",").some((span) => {
    const [low, high] = span.split("-").map(Number);
    return rank >= low && rank <= (high === undefined ? low : high);
  });
  const rankInput = document.getElementById("rank");
  const rankCount = document.getElementById("rank-count");
  rankInput.addEventListener("input", () => {
    const text = rankInput.value.trim();
    const rank = /^[0-9]{1,8}$/.test(text) ? Number(text) : NaN;
    let found = 0;
    let first = null;
    for (const chip of all("[data-ranks]")) {
      const is = chip.dataset.ranks !== "" && holds(chip.dataset.ranks, rank);
      chip.classList.toggle("found", is);
      if (is) {
        found += 1;
        first = first || chip;
      }
    }
    rankCount.textContent = text === "" ? "" : found === 1 ? "1 place" : found + " places";
    if (first) first.scrollIntoView({ block: "nearest" });
  });

  // Search the output.
  const search = document.getElementById("search");
  if (search) {
    const count = document.getElementById("search-count");
    const blocks = all(".out").map((element) => ({ element, text: element.textContent.toLowerCase(), was: element.open }));
    const marks = typeof Highlight === "function" && CSS.highlights ? new Highlight() : null;
    if (marks) CSS.highlights.set("search", marks);
    const paint = (element, wanted) => {
      const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
      for (let node = walker.nextNode(); node && marks.size < 5000; node = walker.nextNode()) {
        const text = node.data.toLowerCase();
        for (let at = text.indexOf(wanted); at >= 0 && marks.size < 5000; at = text.indexOf(wanted, at + wanted.length)) {
          if (at + wanted.length > node.data.length) break;
          const range = document.createRange();
          range.setStart(node, at);
          range.setEnd(node, at + wanted.length);
          marks.add(range);
        }
      }
    };
    const more = document.querySelector("#output .more");
    search.addEventListener("input", () => {
      const wanted = search.value.toLowerCase();
      let found = 0;
      if (more) more.open = wanted !== "";
      if (marks) marks.clear();
      for (const block of blocks) {
        const has = wanted !== "" && block.text.includes(wanted);
        block.element.classList.toggle("away", wanted !== "" && !has);
        block.element.open = wanted === "" ? block.was : has;
        if (!has) continue;
        found += 1;
        for (const inner of all("details", block.element)) {
          if (inner.textContent.toLowerCase().includes(wanted)) inner.open = true;
        }
        if (marks) paint(block.element, wanted);
      }
      count.textContent = wanted === "" ? "" : found + " of " + blocks.length;
    });
  }

  // The flame view: a box that is clicked takes the whole width.
  for (const flame of all(".flame")) {
    const boxes = all(".box", flame).map((element) => ({
      element,
      left: parseFloat(element.style.left),
      width: parseFloat(element.style.width),
    }));
    const show = (left, width) => {
      for (const box of boxes) {
        const from = Math.max(box.left, left);
        const to = Math.min(box.left + box.width, left + width);
        box.element.classList.toggle("away", to - from < width * 1e-4);
        box.element.style.left = ((from - left) / width) * 100 + "%";
        box.element.style.width = ((to - from) / width) * 100 + "%";
      }
    };
    const reset = document.createElement("button");
    reset.type = "button";
    reset.textContent = "Show all ranks";
    reset.hidden = true;
    flame.before(reset);
    reset.addEventListener("click", () => {
      show(0, 100);
      reset.hidden = true;
    });
    for (const box of boxes) {
      box.element.addEventListener("click", () => {
        show(box.left, box.width);
        reset.hidden = box.width > 99.99;
      });
    }
  }

  // All at once, and on paper.
  const tree = document.querySelector("#stacks .tree");
  if (tree) {
    const toggle = document.createElement("button");
    toggle.type = "button";
    const name = () => { toggle.textContent = all("details:not([open])", tree).length ? "Open all" : "Close all"; };
    tree.before(toggle);
    name();
    toggle.addEventListener("click", () => {
      const open = all("details:not([open])", tree).length > 0;
      for (const one of all("details", tree)) one.open = open;
      name();
    });
  }
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])").filter((one) => !one.closest("#settings, #output"));
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
})();
