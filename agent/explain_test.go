package agent

import (
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// explain asks the agent to explain the latest look-up of a prompt. A look-up is remembered just
// after its answer.
func (r *rig) explain(hashes []byte) (e history.Explanation) {
	r.t.Helper()
	id := hex.EncodeToString(hashes[len(hashes)-8:])
	pooltest.Until(r.t, "the look-up is remembered", func() bool {
		body, err := adminclient.New(r.dir).Get(r.t.Context(), "/explain?request="+id)
		if err != nil {
			return false
		}
		check(r.t, json.Unmarshal(body, &e))
		return true
	})
	return e
}

// explainUntil is explain until the reason is the one that is wanted.
func (r *rig) explainUntil(hashes []byte, reason string) (e history.Explanation) {
	r.t.Helper()
	defer func() {
		if r.t.Failed() {
			r.t.Logf("the explanation is %+v", e)
		}
	}()
	pooltest.Until(r.t, "the reason is "+reason, func() bool {
		e = r.explain(hashes)
		return e.Reason == reason
	})
	return e
}

// asking is the reserving look-up of a prompt of n blocks and one token.
func asking(answer *ipc.Registered, scheduler *client, hashes []byte) ipc.LookupRequest {
	return ipc.LookupRequest{
		Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReserve,
		Tokens: uint64(len(hashes)/32*testBlockTokens + 1), HashLen: 32, Hashes: hashes,
	}
}

// prompt is a chain whose last bytes, which name its look-up, are its own.
func prompt(seed byte, n int) []byte {
	blob := chain(seed, n)
	for i := range n {
		copy(blob[i*32+24:], []byte{seed, byte(i), byte(i >> 8)})
	}
	return blob
}

func fatesOf(e *history.Explanation) (out []string) {
	for i := range e.Blocks {
		out = append(out, e.Blocks[i].Fate)
	}
	return out
}

func TestExplainNeverStored(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	scheduler, workers, answer := r.joinEngine(register("a"))
	hashes := prompt(1, 8)
	workers[0].save(answer.Epoch, hashes[:3*32], 0)
	ask(t, r.asker(socketdir.Lookup), asking(answer, scheduler, hashes))
	e := r.explainUntil(hashes, history.NotStored)
	if got := fatesOf(&e); !slices.Equal(got, []string{history.Found, history.NotStored}) || e.Blocks[1].From != 3 ||
		e.Blocks[1].To != 7 || e.Asked.Status != "hit" || e.Asked.Found != 3*testBlockTokens || e.Model != "test" {
		t.Errorf("%+v %+v", e, e.Asked)
	}
}

func TestExplainFound(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	scheduler, workers, answer := r.joinEngine(register("a"))
	hashes := prompt(1, 4)
	workers[0].save(answer.Epoch, hashes, 0)
	q := asking(answer, scheduler, hashes)
	q.Tokens-- // the last block would leave nothing to compute
	ask(t, r.asker(socketdir.Lookup), q)
	r.explainUntil(hashes, history.Complete)
}

func TestExplainEvicted(t *testing.T) {
	const blocks = 1 << 20 / testBlockBytes
	r := newRig(t, withPool(1<<20))
	scheduler, workers, answer := r.joinEngine(register("a"))
	hashes := prompt(1, 4)
	workers[0].save(answer.Epoch, hashes, 0)
	for i := range byte(2 * blocks / testBlocks) {
		workers[0].save(answer.Epoch, prompt(2+i, testBlocks), 0)
	}
	ask(t, r.asker(socketdir.Lookup), asking(answer, scheduler, hashes))
	e := r.explainUntil(hashes, history.Evicted)
	if f := e.Blocks[0]; len(e.Blocks) != 1 || f.At == nil || f.At.After(e.Asked.At) {
		t.Errorf("%+v", e)
	}
	if !strings.Contains(e.Text, "to make room (the least recently used)") {
		t.Errorf("the text is %q", e.Text)
	}
}

func TestExplainReset(t *testing.T) {
	for name, c := range map[string]struct {
		reset func(r *rig, scheduler *client)
		by    string
	}{
		"by an engine": {func(_ *rig, scheduler *client) {
			scheduler.send(&ipc.Reset{Req: 5})
			next[*ipc.ResetDone](scheduler)
		}, `instance "a"`},
		"by the operator": {func(r *rig, _ *client) {
			_, err := adminclient.New(r.dir).Post(r.t.Context(), "/cache/rm?model=test", nil)
			check(r.t, err)
		}, "the operator"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, withPool(4<<20))
			scheduler, workers, answer := r.joinEngine(register("a"))
			hashes := prompt(1, 4)
			workers[0].save(answer.Epoch, hashes, 0)
			c.reset(r, scheduler)
			ask(t, r.asker(socketdir.Lookup), asking(answer, scheduler, hashes))
			e := r.explainUntil(hashes, history.WasReset) // once they were swept
			if !strings.HasPrefix(e.Blocks[0].By, c.by) {
				t.Errorf("by %q, want %q", e.Blocks[0].By, c.by)
			}
		})
	}
}

func TestExplainOtherSpace(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	_, workers, answer := r.joinEngine(register("a"))
	hashes := prompt(1, 4)
	workers[0].save(answer.Epoch, hashes, 0)
	other := register("b")
	other.Identity = slices.Clone(other.Identity)
	other.Identity[0].Value = "fp8"
	scheduler, _, mine := r.joinEngine(other)
	ask(t, r.asker(socketdir.Lookup), asking(mine, scheduler, hashes))
	e := r.explainUntil(hashes, history.OtherSpace)
	want := []history.Difference{{Field: "dtype", Asked: "fp8", Has: "bf16"}}
	if f := e.Blocks[0]; !slices.Equal(f.Differences, want) || f.Space != hex.EncodeToString(answer.Space[:]) {
		t.Errorf("%+v", f)
	}
}

func TestExplainRefusals(t *testing.T) {
	no := false
	for reason, c := range map[string]struct {
		spoil func(r *rig, q *ipc.LookupRequest)
		text  string
	}{
		history.LoadsOff:      {func(r *rig, _ *ipc.LookupRequest) { r.agent.Set(&no, nil) }, "kvagent set loads=on"},
		history.NotRegistered: {func(_ *rig, q *ipc.LookupRequest) { q.Space = [16]byte{9} }, "no engine of the space"},
		history.NoSession:     {func(_ *rig, q *ipc.LookupRequest) { q.Session = 1 }, "no session"},
		history.LeaseCap:      {func(*rig, *ipc.LookupRequest) {}, "half of the pool"},
		history.Malformed:     {func(_ *rig, q *ipc.LookupRequest) { q.Groups = []uint8{3} }, "could not read"},
		history.Overloaded:    {func(_ *rig, q *ipc.LookupRequest) { q.DeadlineUS = 1 }, "deadline"},
	} {
		t.Run(reason, func(t *testing.T) {
			r := newRig(t, withPool(4<<20), withConfig(func(c *Config) {
				if reason == history.LeaseCap {
					c.LeaseBytes = testBlockBytes / 2
				}
			}))
			scheduler, workers, answer := r.joinEngine(register("a"))
			hashes := prompt(1, 4)
			workers[0].save(answer.Epoch, hashes, 0)
			q := asking(answer, scheduler, hashes)
			c.spoil(r, &q)
			ask(t, r.asker(socketdir.Lookup), q)
			if e := r.explainUntil(hashes, reason); !strings.Contains(e.Text, c.text) {
				t.Errorf("%q, want %q in it", e.Text, c.text)
			}
		})
	}
}

func TestExplainRefusedSaves(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	scheduler, workers, answer := r.joinEngine(register("a"))
	no := false
	r.agent.Set(nil, &no)
	hashes := prompt(1, 4)
	workers[0].save(answer.Epoch, hashes, 0)
	ask(t, r.asker(socketdir.Lookup), asking(answer, scheduler, hashes))
	if e := r.explainUntil(hashes, history.NotSaved); e.Blocks[0].Why != "off" || e.Blocks[0].To != 3 {
		t.Errorf("%+v", e)
	}
	stale := prompt(2, 4)
	yes := true
	r.agent.Set(nil, &yes)
	workers[0].save(answer.Epoch+7, stale, 0)
	ask(t, r.asker(socketdir.Lookup), asking(answer, scheduler, stale))
	if e := r.explainUntil(stale, history.NotSaved); e.Blocks[0].Why != "stale" {
		t.Errorf("%+v", e)
	}
}

func TestExplainTierLate(t *testing.T) {
	r, f, scheduler, _, q := slowTier(t, fault.Hang, tier.Tier{AskWithin: time.Minute})
	f.Switch(true)
	q.DeadlineUS, q.Session = 2000, scheduler.welcome.Session
	if got := askRaw(t, r.asker(socketdir.Lookup), q); got.Status != ipc.LookupPending {
		t.Fatalf("%+v, want pending", got)
	}
	f.Switch(false)
	e := r.explainUntil(q.Hashes, history.TierLate)
	if !e.Asked.Late || e.Blocks[0].Fate != history.InTier {
		t.Errorf("%+v", e)
	}
}

// Histories are on admin.sock alone.
func TestExplainIsForTheOperator(t *testing.T) {
	r := newRig(t, withPool(4<<20), withGuests(func(o *guests.Options) { o.HTTP.HTTP = "127.0.0.1:0" }))
	answer, err := http.Get("http://" + r.httpAddr() + "/explain?last=5")
	check(t, err)
	check(t, answer.Body.Close())
	if answer.StatusCode != http.StatusForbidden {
		t.Errorf("over TCP: %s", answer.Status)
	}
	for query, want := range map[string]string{
		"": "none is given", "?last=x": "last", "?request=00": "no such look-up", "?block=0x": "2 to 64 hex digits",
	} {
		if _, err := adminclient.New(r.dir).Get(t.Context(), "/explain"+query); !contains(err, want) {
			t.Errorf("%s: %v, want %q in it", query, err, want)
		}
	}
}

// A probe and the look-ups that follow it are one request in the list, the last of which counts.
func TestProbesAreTheirRequests(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	scheduler, _, answer := r.joinEngine(register("a"))
	look, q := r.asker(socketdir.Lookup), asking(answer, scheduler, prompt(1, 4))
	for _, want := range []ipc.LookupWant{ipc.WantProbe, ipc.WantReserve, ipc.WantReserve} {
		q.Want = want
		ask(t, look, q)
	}
	recent := r.recent(2)
	if a := recent.Lookups; a[0].Times != 1 || a[1].Times != 2 || a[0].Space != hex.EncodeToString(answer.Space[:]) {
		t.Errorf("%+v", recent)
	}
	_, err := adminclient.New(r.dir).Get(t.Context(), "/explain?request=ffffffffffffffff")
	if !contains(err, "no such") {
		t.Errorf("%v", err)
	}
}

// recent returns what the agent says of the last look-ups once it remembers so many.
func (r *rig) recent(n int) (recent history.Recent) {
	r.t.Helper()
	pooltest.Until(r.t, "all are remembered", func() bool {
		body, err := adminclient.New(r.dir).Get(r.t.Context(), "/explain?last=100")
		check(r.t, err)
		recent = history.Recent{}
		check(r.t, json.Unmarshal(body, &recent))
		return len(recent.Lookups) == n
	})
	return recent
}

// The reasons of the last hour have the tokens that each cost, the most expensive first.
func TestExplainReasons(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	scheduler, workers, answer := r.joinEngine(register("a"))
	look, no, yes := r.asker(socketdir.Lookup), false, true
	for i, n := range []int{8, 6} { // 3 blocks of each are found
		hashes := prompt(byte(1+i), n)
		workers[0].save(answer.Epoch, hashes[:3*32], 0)
		ask(t, look, asking(answer, scheduler, hashes))
	}
	r.agent.Set(nil, &no)
	refused := prompt(3, 9)
	workers[0].save(answer.Epoch, refused, 0)
	r.agent.Set(nil, &yes)
	ask(t, look, asking(answer, scheduler, refused))
	r.agent.Set(&no, nil)
	ask(t, look, asking(answer, scheduler, prompt(1, 8)))
	want := []history.Reason{
		{Reason: history.NotSaved, Tokens: 9*testBlockTokens + 1, Lookups: 1},
		{Reason: history.LoadsOff, Tokens: 8*testBlockTokens + 1, Lookups: 1},
		{Reason: history.NotStored, Tokens: 8*testBlockTokens + 2, Lookups: 2},
	}
	slices.SortFunc(want, func(a, b history.Reason) int { return int(b.Tokens) - int(a.Tokens) })
	if got := r.recent(4); !slices.Equal(got.Reasons, want) || got.Bytes != history.Bytes {
		t.Errorf("%+v, want %+v", got.Reasons, want)
	}
}

// One block is explained in each space that knows of it.
func TestExplainBlock(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	_, workers, answer := r.joinEngine(register("a"))
	hashes := prompt(1, 4)
	workers[0].save(answer.Epoch, hashes, 0)
	other := register("b")
	other.Identity = slices.Clone(other.Identity)
	other.Identity[0].Value = "fp8"
	r.joinEngine(other)
	body, err := adminclient.New(r.dir).Get(t.Context(), "/explain?block="+hex.EncodeToString(hashes[:32]))
	check(t, err)
	var all []history.Explanation
	check(t, json.Unmarshal(body, &all))
	if len(all) != 1 || all[0].Space != hex.EncodeToString(answer.Space[:]) || all[0].Reason != history.Stored {
		t.Errorf("%+v", all)
	}
}
