package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

const testTTL = 300_000 // ms, so that nothing ends by it while a test waits for something else

// pair is a prefill and a decode engine of one model, on one agent or on two.
type pair struct {
	p, d      *rig
	prefill   *client // P's scheduler
	worker    *client
	epoch     uint32
	decode    *client // D's scheduler
	loader    *client
	look      *mockengine.LookupClient
	loadEpoch uint32
}

func newPair(t testing.TB, p, d *rig) *pair {
	t.Helper()
	x := &pair{p: p, d: d}
	prefill, w, answer := p.joinEngine(register("prefill"))
	x.prefill, x.worker, x.epoch = prefill, w[0], answer.Epoch
	decode, w, answer := d.joinEngine(register("decode"))
	x.decode, x.loader, x.loadEpoch = decode, w[0], answer.Epoch
	x.look = d.asker(socketdir.Lookup)
	return x
}

// question asks for a whole prompt of n blocks and a bit, which a transfer is to bring.
func (x *pair) question(n int, name string) ipc.LookupRequest {
	return ipc.LookupRequest{
		Space: register("").Space(), Session: x.decode.welcome.Session, Want: ipc.WantReserve,
		Tokens: uint64(n*testBlockTokens) + 3, HashLen: 32, Hashes: chain(1, n), Transfer: []byte(name),
	}
}

// ask asks, and releases the lease of the answer. Without a lease it returns no tokens: an answer
// has some if nothing could be reserved at the moment.
func (x *pair) ask(q ipc.LookupRequest) ipc.LookupReply {
	x.d.t.Helper()
	got := ask(x.d.t, x.look, q)
	switch {
	case got.Lease != 0 && got.Tokens == 0:
		x.d.t.Errorf("%+v: a lease without tokens", got)
	case got.Lease != 0:
		x.decode.send(&ipc.Release{Leases: []uint64{got.Lease}})
		x.decode.sync()
	case got.Tokens != 0 && got.Status != ipc.LookupPending && got.Status != ipc.LookupLeaseCap:
		x.d.t.Errorf("%+v: tokens without a lease", got)
	default:
		got.Tokens = 0
	}
	return got
}

// answers asks, and compares status and blocks.
func (x *pair) answers(q ipc.LookupRequest, want ipc.LookupStatus, blocks int) {
	x.d.t.Helper()
	if got := x.ask(q); got.Status != want || got.Tokens != uint32(blocks*testBlockTokens) {
		x.d.t.Errorf("status %d with %d tokens, want status %d with %d blocks of %d", got.Status, got.Tokens, want,
			blocks, testBlockTokens)
	}
}

// until asks until the answer is of some blocks, or of another status than pending.
func (x *pair) until(q ipc.LookupRequest, blocks int) (got ipc.LookupReply) {
	x.d.t.Helper()
	answered := false
	defer func() { // also when Until ends the test
		if !answered {
			x.d.t.Errorf("still %+v", got)
		}
	}()
	pooltest.Until(x.d.t, "an answer", func() bool {
		got = x.ask(q)
		return got.Status != ipc.LookupPending || got.Tokens >= uint32(blocks*testBlockTokens)
	})
	answered = true
	return got
}

// say sends messages of the prefill engine's scheduler, and waits until they are served.
func (x *pair) say(messages ...any) {
	x.p.t.Helper()
	for _, m := range messages {
		x.prefill.send(m)
	}
	x.prefill.sync()
}

// save stores blocks from to to-1 of the prompt.
func (x *pair) save(from, to int) {
	x.p.t.Helper()
	for i := from; i < to; i++ {
		x.worker.fill(i, byte(i+1))
	}
	x.saves(chain(1, to), from, to)
}

// saves stores blocks from to to-1 of a chain.
func (x *pair) saves(hashes []byte, from, to int) {
	one := section(hashes[from*32:to*32], uint32(from))
	if from > 0 {
		one.Parent = hashes[(from-1)*32 : from*32]
	}
	x.worker.job++
	x.worker.send(&ipc.Save{Job: x.worker.job, Epoch: x.epoch, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{one}})
	if got := x.worker.done(x.worker.job); !all(got, blockOK) {
		x.p.t.Fatalf("save: %v", got)
	}
}

// loads loads the first blocks at D, and compares every byte.
func (x *pair) loads(q ipc.LookupRequest, blocks int) {
	x.d.t.Helper()
	got := ask(x.d.t, x.look, q)
	if got.Tokens != uint32(blocks*testBlockTokens) {
		x.d.t.Fatalf("%+v, want %d blocks", got, blocks)
	}
	if got := x.loader.load(x.loadEpoch, got.Lease, chain(1, blocks), 20); !all(got, blockOK) {
		x.d.t.Fatalf("load: %v", got)
	}
	for i := range blocks {
		if !x.loader.filled(20+i, byte(i+1)) {
			x.d.t.Errorf("block %d has other bytes than were saved", i)
		}
	}
	x.decode.send(&ipc.Release{Leases: []uint64{got.Lease}})
	x.decode.sync()
}

func offer(name string, blocks int) *ipc.Offer {
	return &ipc.Offer{Name: []byte(name), Tokens: uint32(blocks * testBlockTokens), TTLMS: testTTL}
}

func offered(name string, blocks int) *ipc.Offered {
	return &ipc.Offered{Name: []byte(name), Tokens: uint32(blocks * testBlockTokens)}
}

func delivered(name string) *ipc.Delivered { return &ipc.Delivered{Name: []byte(name)} }

// transfers checks the table of an agent.
func (r *rig) transfers(open, complete int) {
	r.t.Helper()
	if x := r.guests.Status().Transfers; x.Open != open || x.Complete != complete {
		r.t.Errorf("%d open, %d complete, want %d, %d", x.Open, x.Complete, open, complete)
	}
}

// A look-up that names an open transfer is pending with what there is, until it has all of it.
func TestLookupWaitsForTransfer(t *testing.T) {
	r := newRig(t)
	x := newPair(t, r, r)
	q := x.question(8, "a")
	x.answers(q, ipc.LookupHit, 0)
	x.say(offer("a", 8))
	probe := q
	probe.Want = ipc.WantProbe
	if got := ask(t, x.look, probe); got.Status != ipc.LookupPending {
		t.Errorf("a probe is answered %+v, want pending", got)
	}
	r.transfers(1, 0)
	x.answers(q, ipc.LookupPending, 0)
	x.save(0, 4)
	x.answers(q, ipc.LookupPending, 4)
	r.transfers(1, 0)
	other := q
	other.Transfer = nil // the same prompt without the name does not wait
	x.answers(other, ipc.LookupHit, 4)
	x.save(4, 8)
	x.answers(q, ipc.LookupHit, 8)
	r.transfers(1, 0)
	x.say(offered("a", 8))
	r.transfers(0, 1)
	x.loads(q, 8)
	x.decode.send(delivered("a"))
	x.decode.sync()
	r.transfers(0, 0)
	if s := r.guests.Status().Transfers; s.Delivered != 1 || s.Opened != 1 {
		t.Errorf("%+v", s)
	}
}

// A look-up waits no more when less than the prompt was promised and has come, and when nothing
// more will come.
func TestLookupTakesWhatThereIs(t *testing.T) {
	for name, end := range map[string]func(*pair){
		"offered":   func(x *pair) { x.say(offered("a", 4)) },
		"delivered": func(x *pair) { x.decode.send(delivered("a")); x.decode.sync() },
		"session":   func(x *pair) { x.prefill.close(); x.p.waitFor("its end", noOpenTransfer) },
		"unregister": func(x *pair) {
			x.prefill.send(&ipc.Unregister{Req: 9})
			next[*ipc.Unregistered](x.prefill)
		},
		"time": func(x *pair) {
			x.say(&ipc.Offer{Name: []byte("a"), Tokens: 8 * testBlockTokens, TTLMS: 1})
			x.p.waitFor("its time", func(s admin.Status) bool { return s.Transfers.Expired == 1 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			x := newPair(t, r, r)
			q := x.question(8, "a")
			x.say(offer("a", 8))
			x.save(0, 4)
			x.answers(q, ipc.LookupPending, 4)
			end(x)
			x.answers(q, ipc.LookupHit, 4)
			if s := r.guests.Status().Transfers; s.Open != 0 {
				t.Errorf("left: %+v", s)
			}
		})
	}
}

func noOpenTransfer(s admin.Status) bool { return s.Transfers.Open == 0 }

// hookedIndex calls a function after each Pin and Prefix.
type hookedIndex struct {
	pool.Index
	then func()
}

func (x *hookedIndex) Pin(s pool.SpaceID, group uint8, h pool.Hashes, most int64, refs []pool.Ref) (
	n int, all []pool.Ref, bytes int64,
) {
	defer x.then()
	return x.Index.Pin(s, group, h, most, refs)
}

func (x *hookedIndex) Prefix(s pool.SpaceID, group uint8, h pool.Hashes) int {
	defer x.then()
	return x.Index.Prefix(s, group, h)
}

// The transfer is saved and completed while a look-up is answered, after it has read the index: it
// finds the blocks, or is told to ask again, not that there is nothing.
func TestTransferCompleteWhileAsked(t *testing.T) {
	for name, reserve := range map[string]bool{"probe": false, "reserve": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			x := newPair(t, r, r)
			x.say(offer("a", 8))
			k := *r.agent.sockets.byName[socketdir.Lookup].answers
			k.index = &hookedIndex{k.index, sync.OnceFunc(func() {
				x.save(0, 8)
				x.say(offered("a", 8))
			})}
			sock := &lookupSock{answers: &k}
			q := x.question(8, "a")
			q.Form, q.DeadlineUS, q.Want = ipc.FormOwn, uint32(patience/time.Microsecond), ipc.WantProbe
			if reserve {
				q.Want = ipc.WantReserve
			}
			if got := sock.handleNow(&q); got.Status != ipc.LookupPending && got.Tokens != 8*testBlockTokens {
				t.Errorf("%+v: the blocks that were stored meanwhile are neither in the answer nor waited for", got)
			}
			x.answers(x.question(8, "a"), ipc.LookupHit, 8)
		})
	}
}

// The wait is bounded by the promised blocks, as it is by the engine's own.
func TestLookupWaitsForNoMoreThanWasPromised(t *testing.T) {
	r := newRig(t)
	x := newPair(t, r, r)
	q := x.question(8, "a")
	x.say(offer("a", 4))
	x.save(0, 4)
	x.answers(q, ipc.LookupHit, 4)
	x.say(offer("b", 8))
	own := x.question(8, "b")
	own.HBMTokens = 8 * testBlockTokens
	x.answers(own, ipc.LookupHit, 0)
	exact := x.question(5, "b") // its last token is always computed, so its last block is not waited for
	exact.Tokens = 5 * testBlockTokens
	x.answers(exact, ipc.LookupHit, 4)
}

// An unknown transfer is waited for only if it may still be offered.
func TestEarlyLookup(t *testing.T) {
	r := newRig(t, withGuests(func(o *guests.Options) { o.Peers.Address = "this:1" }))
	x := newPair(t, r, r)
	q := x.question(2, "a")
	x.answers(q, ipc.LookupHit, 0)
	q.Early = true
	x.answers(q, ipc.LookupPending, 0)
	q.Peer = "this:1" // the agent's own address
	x.answers(q, ipc.LookupPending, 0)
	if x.prefill.welcome.Peer != "this:1" {
		t.Errorf("WELCOME says %q", x.prefill.welcome.Peer)
	}
	x.say(offered("a", 0))
	if got := x.ask(q); got.Status != ipc.LookupHit {
		t.Errorf("%+v: a transfer that is complete and not delivered is waited for", got)
	}
	q = x.question(2, "b")
	q.Peer = "other:1" // which this agent cannot ask
	x.answers(q, ipc.LookupHit, 0)
}

// A prefill engine has answered, and its OFFER was sent before the decode engine asks, but waits to
// be served: the look-up waits. Another message is not taken for it once it was served.
func TestLookupOvertakesOffer(t *testing.T) {
	for name, message := range map[string]any{"offer": offer("a", 8), "other": &ipc.Release{Leases: []uint64{1}}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			x := newPair(t, r, r)
			q := x.question(8, "a")
			miss := func() { // once the reader has ended what it served last
				pooltest.Until(t, "a miss", func() bool {
					got := x.ask(q)
					return got.Status == ipc.LookupHit && got.Tokens == 0
				})
			}
			miss()
			reader := &r.agent.registry.view.Load().seats[x.prefill.welcome.Session].session.mu
			reader.Lock() // a moment before it serves what it has received
			x.prefill.send(message)
			x.answers(q, ipc.LookupPending, 0)
			reader.Unlock()
			x.prefill.sync()
			if name == "other" {
				miss()
				return
			}
			x.answers(q, ipc.LookupPending, 0)
			x.save(0, 8)
			x.say(offered("a", 8))
			x.answers(q, ipc.LookupHit, 8)
		})
	}
}

// Names are bytes, and those of one space are not those of another.
func TestNamesOfTransfers(t *testing.T) {
	r := newRig(t)
	x := newPair(t, r, r)
	elsewhere := register("elsewhere")
	elsewhere.Identity[1].Value = "another model"
	stranger, _, _ := r.joinEngine(elsewhere)
	names := []string{"\x00", "\xff\xfe", "../../etc/passwd", "a\nb", `"}{`, "%s%n",
		strings.Repeat("n", ipc.MaxTransferName), strings.Repeat("n", ipc.MaxTransferName-1), "\x00\x00"}
	for i, name := range names {
		stranger.send(offer(name, 2))
		stranger.sync()
		x.answers(x.question(2, name), ipc.LookupHit, 0)
		x.say(offer(name, 2))
		x.answers(x.question(2, name), ipc.LookupPending, 0)
		r.transfers(2*(i+1), 0)
	}
	for _, name := range names {
		x.decode.send(delivered(name))
	}
	x.decode.sync()
	r.transfers(len(names), 0)
}

// Messages about transfers of sessions without a registration are ignored and counted; in older
// versions they are malformed.
func TestTransfersWithoutRegistration(t *testing.T) {
	r := newRig(t)
	c := r.dial()
	c.send(offer("a", 2))
	c.send(offered("a", 2))
	c.send(delivered("a"))
	c.sync()
	if s := r.guests.Status().Transfers; s.Ignored != 3 || s.Opened != 0 {
		t.Errorf("%+v", s)
	}
}

// Beyond 4,096 transfers a new one is refused, and not waited for.
func TestTooManyTransfers(t *testing.T) {
	r := newRig(t)
	x := newPair(t, r, r)
	for i := range 4096 {
		x.prefill.send(offer(fmt.Sprint(i), 2))
	}
	x.say(offer("one more", 2))
	r.transfers(4096, 0)
	x.answers(x.question(2, "one more"), ipc.LookupHit, 0)
	x.answers(x.question(2, "4095"), ipc.LookupPending, 0)
	if s := r.guests.Status().Transfers; s.Refused != 1 || s.Open != 4096 {
		t.Errorf("%+v", s)
	}
}

// GET /query names the engines and the agent's address, as the Mooncake connector's proxy reads it.
func TestBootstrapQuery(t *testing.T) {
	r := newRig(t, withGuests(func(o *guests.Options) {
		o.HTTP.HTTP, o.Peers.Address = "127.0.0.1:0", "node-1:7460"
		o.Peers.Report = func() *admin.PeersStatus { return &admin.PeersStatus{} }
	}))
	get := func() (engines map[string]struct {
		EngineID   string             `json:"engine_id"`
		WorkerAddr *map[string]string `json:"worker_addr"`
	}) {
		answer, err := http.Get("http://" + r.httpAddr() + "/query")
		check(t, err)
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		check(t, err)
		check(t, json.Unmarshal(text, &engines))
		return engines
	}
	if got := get(); len(got) != 0 {
		t.Errorf("%v without an engine", got)
	}
	r.joinEngine(register("b@c"))
	r.joinEngine(register("a"))
	if got := get(); len(got) != 1 || got["0"].EngineID != "a@node-1:7460" || got["0"].WorkerAddr == nil {
		t.Errorf("%+v, want one engine: the proxy would ask the other as a rank of it", got)
	}
	r.joinEngine(register("p_dp0"))
	r.joinEngine(register("p_dp1"))
	if got := get(); len(got) != 2 || got["1"].EngineID != "p_dp1@node-1:7460" {
		t.Errorf("%+v, want both ranks", got)
	}
}

// The series of transfers are there at zero; those of peers are not, of an agent on its own.
func TestTransferMetricsAtZero(t *testing.T) {
	wantAtStart(t,
		`kvagent_transfers{state="open"} 0`, `kvagent_transfers{state="complete"} 0`,
		`kvagent_transfers_total{event="expired"} 0`, `kvagent_transfers_total{event="delivered"} 0`,
		`kvagent_peer_fetches_total{event="refused"} 0`,
	)
	n := newNode(t, "key")
	for _, line := range []string{
		`kvagent_peer_fetches_ended_total{end="lost"} 0`, `kvagent_peer_blocks_failed_total{reason="corrupt"} 0`,
		"kvagent_peer_connections 0", "kvagent_peer_unauthenticated_total 0",
	} {
		n.wantMetric(line)
	}
}
