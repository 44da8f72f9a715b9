package page_test

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/agent/page"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// node plays a busy agent by formulas: the same picture each time.
type node struct {
	engines int
	second  atomic.Int64
}

const gib = 1 << 30

// serveNode serves the page of a node that has run for an hour and more.
func serveNode(t *testing.T, engines int, hashes bool) (host string) {
	t.Helper()
	n := &node{engines: engines}
	var hour []page.Point
	begin := time.Now().Add(-(page.MaxPoints - 10) * 2 * time.Second)
	for i := range page.MaxPoints - 10 {
		p, _ := n.sample()
		p.At = begin.Add(time.Duration(i) * 2 * time.Second).UnixMilli()
		hour = append(hour, p)
	}
	p := page.Start(page.Source{Sample: n.sample, Explain: n.explain}, zap.NewNop())
	p.Backfill(hour)
	mux := http.NewServeMux()
	p.Add(mux, hashes)
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		p.Close()
		server.Close()
	})
	return strings.TrimPrefix(server.URL, "http://")
}

// wave returns a number from 0 to 1 that goes up and down.
func wave(second float64, i int) float64 { return (1 + math.Sin(second/300+1.7*float64(i))) / 2 }

// total returns a count that grows by most a second at the most, as a wave does.
func total(second, most float64, i int) uint64 {
	phase := 1.7 * float64(i)
	return uint64(most / 2 * (1.5*second + 300*(math.Cos(phase)-math.Cos(second/300+phase))))
}

func (n *node) sample() (page.Point, any) {
	at := float64(n.second.Add(2))
	busy := float64(min(n.engines, 1))
	looked, asked := total(at, 12_000*busy, 1), total(at, 200_000*busy, 1)
	// share is a part of a count that grows, more of it at some times than at others.
	share := func(of uint64, part float64) uint64 { return uint64((part + 0.02*math.Sin(at/70)/at*70) * float64(of)) }
	p := page.Point{
		Lookups: total(at, 60*busy, 1), TokensAsked: asked, TokensFound: share(asked, 0.66),
		Blocks: looked, BlocksHit: share(looked, 0.58),
		BlocksUnlimited: share(looked, 0.74),
		Loaded:          total(at, 16*gib*busy, 1), Saved: total(at, 6*gib*busy, 2),
		Tiers:     [][2]uint64{{total(at, gib*busy, 1), total(at, gib*busy/2, 2)}, {looked << 14, looked << 13}},
		SlowestUS: (300 + 500*wave(at*7, 3)) * busy, Engines: n.engines, Complete: max(n.engines-1, 0),
		Used: int64((180 + 60*wave(at, 0)*busy) * gib), Pinned: int64(n.engines) * gib / 8, Capacity: 256 * gib,
	}
	if n.engines == 1 {
		p.Complete = 1
	}
	return p, n.status(&p, at)
}

func (n *node) status(p *page.Point, at float64) *report.Status {
	st := &report.Status{
		Version: "v1.0.0", PID: 4711, UptimeSeconds: 26*3600 + at, Ready: true,
		Switches: report.SwitchState{Loads: true, Saves: true}, Engines: n.engines, Jobs: n.engines / 2,
		Leases: n.engines / 3, TokensAsked: p.TokensAsked, TokensFound: p.TokensFound, BytesSaved: p.Saved,
		BytesLoaded: p.Loaded, LookupMaxUS: 812,
		Pool: pool.Stats{Capacity: p.Capacity, Used: p.Used, Pinned: p.Pinned},
		Tiers: &pool.TierReport{Tiers: []pool.TierStatus{
			{Name: "disk", State: "up", Usage: pool.Usage{Bytes: 600 * gib, Capacity: 4 << 40},
				Store: pool.StoreReport{State: "ok"}, Hits: p.Blocks / 9, Misses: p.Blocks / 90, Stored: p.Blocks / 5},
			{Name: "redis", State: "open", Error: "dial tcp 10.0.0.7:6379: connection refused"},
		}},
		Movers: []cudaipc.MoverState{
			{Name: "GPU-5e7a1c21", Device: "cuda", PID: 4712, Running: true, UpSeconds: 9000, Peers: n.engines / 2,
				Lost: map[cudaipc.LossReason]uint64{}},
			{Name: "GPU-5e7a1c22", Device: "cuda", PID: 4999, Running: true, UpSeconds: 60, Peers: n.engines / 2,
				Lost: map[cudaipc.LossReason]uint64{"died": 1}, LastLoss: "the mover died: signal: killed"},
		},
		EngineList: []report.EngineStatus{},
	}
	for i := range n.engines {
		st.EngineList = append(st.EngineList, engine(i))
	}
	return st
}

var models = []string{"meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "deepseek-ai/DeepSeek-V3"}

func engine(i int) report.EngineStatus {
	scheduler := report.WorkerStatus{Role: "scheduler", Registered: true, Step: "idle"}
	worker := report.WorkerStatus{Role: "worker", Registered: i != 7, Step: "idle", SaveQueue: i % 5, LoadQueue: i % 3}
	switch {
	case i == 23:
		worker.Step, worker.StepMS = "waits for a step", 2400
	case i%6 == 0:
		worker.Step, worker.StepMS = "load", 3
	}
	return report.EngineStatus{
		Instance: fmt.Sprintf("vllm-%02d", i), Model: models[i%len(models)], Complete: i != 7, World: 1, Leases: i % 4,
		LeaseBytes: int64(i%4) << 28, Sessions: []report.WorkerStatus{scheduler, worker},
	}
}

func (n *node) explain() (reasons, lookups any) {
	why, last := []history.Reason{}, []history.Asked{}
	if n.engines > 0 {
		why = append(why, history.Reason{Reason: history.Evicted, Tokens: 812_440, Lookups: 201},
			history.Reason{Reason: history.NotStored, Tokens: 230_112, Lookups: 96},
			history.Reason{Reason: history.TierLate, Tokens: 16_384, Lookups: 3})
		for i := range 6 {
			last = append(last, history.Asked{
				ID: fmt.Sprintf("6f1c09d2a4b87e3%d", i), Model: models[i%len(models)], Tokens: 4097,
				At: time.Now().Add(-time.Duration(i) * time.Second), Status: "hit", Found: uint32(512 * i),
			})
		}
	}
	return map[string]any{"since": time.Now().Add(-time.Hour), "reasons": why}, last
}

// The page shows a node with 0, 1 and 64 engines, in two sizes, dark and light: all charts have
// data. It asks no other host, has no error, and sorts and filters.
func TestPageInABrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: starts Chromium")
	}
	const rows = "document.querySelectorAll('#engines tbody tr').length"
	b := openBrowser(t)
	for _, engines := range []int{0, 1, 64} {
		host := serveNode(t, engines, engines != 1)
		b.mu.Lock()
		clear(b.hosts)
		b.mu.Unlock()
		b.call("Page.navigate", map[string]any{"url": "http://" + host + "/"}, nil)
		b.until("the last hour is drawn", fmt.Sprintf("location.host === '%s' && "+
			"Number(document.getElementById('charts')?.dataset.points) >= %d", host, page.MaxPoints-10))
		b.eval("var drawn")
		b.is(rows, engines)
		b.is("document.getElementById('state').textContent", "ready")
		b.is("document.querySelectorAll('#charts .chart:not([hidden]) canvas').length", 6)
		b.is("document.getElementById('asked').hidden", engines == 1) // as on an address
		if engines > 0 {
			b.is("document.querySelector('#reasons tbody').innerText.includes('evicted\\t812k\\t201')", true)
		}
		for _, scheme := range []string{"light", "dark"} {
			for _, size := range [][2]int{{1440, 1500}, {420, 1500}} {
				b.look(scheme, size[0], size[1])
				b.is("document.documentElement.scrollWidth", size[0])
				b.inked(engines > 0)
				b.picture(fmt.Sprintf("page-%d-%s-%d", engines, scheme, size[0]))
			}
		}
		b.clean(host)
	}
	first := "document.querySelector('#engines tbody td').textContent"
	b.is("document.querySelector('#engines th button').click(), "+first, "vllm-63")
	b.eval("const f = document.getElementById('filter'); f.value = 'qwen -4'; f.dispatchEvent(new Event('input'))")
	b.is(rows, 4)
}

// inked expects that each chart's last line, which is above the others, is drawn: that its canvas
// has pixels in that line's colour. A node without engines has no hit rate to draw.
func (b *browser) inked(busy bool) {
	b.t.Helper()
	const lines = `[...document.querySelectorAll('#charts canvas')].map((c, chart) => {
		const name = ['--c', '--b', '--d', '--a', '--c', '--b'][chart];
		const colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
		const want = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
		const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', { willReadFrequently: true });
		copy.drawImage(c, 0, 0);
		const all = copy.getImageData(0, 0, c.width, c.height).data;
		let n = 0;
		for (let i = 0; i < all.length; i += 4) {
			if (want.every((v, k) => Math.abs(v - all[i + k]) < 40) && all[i + 3] > 100) n++;
		}
		return n > 50;
	}).join()`
	want := "true,true,true,true,true,true"
	if !busy {
		want = "false,true,true,true,true,true"
	}
	b.is(lines, want)
}
