// Browsers refuse workers in pages that are opened from a folder. The search of the theme then runs in a hidden
// frame, which behaves like a worker for both sides.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<body></body>";
      this.inside = new Promise((done) => this.frame.addEventListener("load", done)).then(() => this.start(url));
      document.body.append(this.frame);
    }

    async start(url) {
      const inside = this.frame.contentWindow;
      const load = (address) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, document.baseURI).href;
          script.onload = done;
          script.onerror = () => failed(new Error(`cannot load ${script.src}`));
          inside.document.body.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      await load(url);
      return inside;
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
