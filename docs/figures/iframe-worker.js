// A Worker for pages that are opened from the disk, where browsers start none: its script runs in a hidden frame. The site's search
// is such a script.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      const load = (src) => new Promise((done, failed) => {
        const script = this.inner.document.createElement("script");
        Object.assign(script, { src, onload: done, onerror: failed });
        this.inner.document.body.append(script);
      });
      this.inner.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
