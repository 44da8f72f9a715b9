package agent

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// owner returns what the status says of an owner.
func (r *rig) owner(name string) (found pool.OwnerStats) {
	r.t.Helper()
	for _, o := range r.guests.Status().Pool.Owners.Each {
		if o.Name == name {
			return o
		}
	}
	r.t.Fatalf("no owner %q: %+v", name, r.guests.Status().Pool.Owners)
	return found
}

// budget tells the agent a budget of whole blocks.
func (c *client) budget(blocks int) {
	c.t.Helper()
	c.send(&ipc.Budget{Bytes: uint64(blocks) * testBlockBytes})
	c.sync()
}

// TestBudgetOfAnEngine has an engine with a budget store more than it may hold, beside one without.
func TestBudgetOfAnEngine(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	for _, line := range []string{
		`kvagent_pool_budget_total{result="evicted"} 0`, `kvagent_pool_budget_total{result="refused"} 0`,
	} {
		r.wantMetric(line)
	}
	_, a, _ := r.joinEngine(register("a"))
	_, b, _ := r.joinEngine(register("b"))
	a[0].budget(8)
	if got := b[0].save(1, chain(9, 20), 0); !all(got, blockOK) {
		t.Fatalf("save %v", got)
	}
	for i := range 3 {
		if got := a[0].save(1, chain(byte(i), 4), 0); !all(got, blockOK) {
			t.Errorf("save %d: %v", i, got)
		}
	}
	if got := a[0].save(1, chain(9, 20), 0); !all(got, blockExists) {
		t.Errorf("save of what the other engine stored: %v", got)
	}
	if o := r.owner("a"); o.Bytes != 8*testBlockBytes || o.Budget != o.Bytes || o.Evicted != 4 || !o.Open {
		t.Errorf("%+v", o)
	}
	if got := b[0].load(1, 0, chain(9, 20), 20); !all(got, blockOK) {
		t.Errorf("load of the other engine: %v", got)
	}
	if got := a[0].load(1, 0, chain(0, 4), 20); !all(got, blockMissing) {
		t.Errorf("load of the oldest: %v", got)
	}
	if got := a[0].save(1, chain(3, 10), 0); all(got, blockOK) || got[7] != blockOK || got[8] != blockBusy {
		t.Errorf("save of more than the budget at once: %v, want the first 8", got)
	}
	for _, line := range []string{
		`kvagent_pool_owner_bytes{owner="a"} 32768`, `kvagent_pool_owner_budget_bytes{owner="a"} 32768`,
		`kvagent_pool_budget_total{result="evicted"} 12`, `kvagent_pool_budget_total{result="refused"} 2`,
	} {
		r.wantMetric(line)
	}
}

// TestBudgetOfTwoRanks tells budgets before and after the sizes of all shards are known: the
// smallest counts, for whole blocks.
func TestBudgetOfTwoRanks(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	m := register("a")
	m.World, m.Shards = 2, 2
	scheduler := r.dial()
	scheduler.send(schedulerOf(m))
	scheduler.registered(next[*ipc.Registered](scheduler))
	var ranks []*client
	for rank := range m.World {
		one := *m
		one.Rank, one.Held = rank, []uint32{rank}
		ranks = append(ranks, r.dial())
		ranks[rank].registered(ranks[rank].registerWorker(&one))
		if rank == 0 {
			ranks[0].budget(6)
		}
	}
	if o := r.owner("a"); o.Budget != 2*6*testBlockBytes {
		t.Errorf("%+v after the first rank's budget", o)
	}
	ranks[1].budget(4)
	for i := range 3 {
		for _, w := range ranks {
			if got := w.save(1, chain(byte(i), 3), 0); !all(got, blockOK) {
				t.Errorf("save %v", got)
			}
		}
	}
	if o := r.owner("a"); o.Budget != 2*4*testBlockBytes || o.Bytes != o.Budget || o.Evicted != 5 {
		t.Errorf("%+v", o)
	}
}

// TestBudgetSurvivesAReconnect ends an engine's session: its blocks still count when it is back.
func TestBudgetSurvivesAReconnect(t *testing.T) {
	r := newRig(t, withPool(4<<20))
	c := r.dial()
	c.registered(c.registerWorker(register("a")))
	c.budget(8)
	c.save(1, chain(1, 8), 0)
	c.close()
	r.waitFor("the session has ended", func(s admin.Status) bool { return s.Sessions == 0 && s.Engines == 0 })
	if o := r.owner("a"); o.Open || o.Bytes != 8*testBlockBytes {
		t.Errorf("%+v without a session", o)
	}
	again := r.dial()
	again.registered(again.registerWorker(register("a")))
	again.budget(4)
	again.save(1, chain(2, 2), 0)
	if o := r.owner("a"); !o.Open || o.Bytes != 4*testBlockBytes || o.Evicted != 6 {
		t.Errorf("%+v after another session with another budget", o)
	}
}

// TestBudgetsAreRefused expects an end of the session that names the field and what is allowed.
func TestBudgetsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		pool rigOption
		send func(c *client)
		want string
	}{
		"without a registration": {withPool(4 << 20), func(c *client) { c.send(&ipc.Budget{Bytes: 1 << 20}) },
			"BUDGET: bytes: no worker is registered"},
		"twice": {withPool(4 << 20), func(c *client) {
			c.registered(c.registerWorker(register("a")))
			c.send(&ipc.Budget{Bytes: 1 << 20})
			c.send(&ipc.Budget{Bytes: 1 << 20})
		}, "allowed once after its registration"},
		"twice, the first of no bytes": {withPool(4 << 20), func(c *client) {
			c.registered(c.registerWorker(register("a")))
			c.send(&ipc.Budget{})
			c.send(&ipc.Budget{Bytes: 1 << 20})
		}, "allowed once after its registration"},
		"less than a block": {withPool(4 << 20), func(c *client) {
			c.registered(c.registerWorker(register("a")))
			c.send(&ipc.Budget{Bytes: testBlockBytes - 1})
		}, "budget: 4095 bytes, allowed: 0, or at least 4096"},
	} {
		t.Run(name, func(t *testing.T) {
			client := newRig(t, c.pool).dial()
			c.send(client)
			if got := next[*ipc.Error](client); !strings.Contains(got.Text, c.want) {
				t.Errorf("%q, want %q", got.Text, c.want)
			}
		})
	}
}

// heldCopies is a device whose copies to the pool do not end from the second on, until release.
type heldCopies struct {
	cudaipc.Device
	gathers atomic.Int32
	release chan struct{}
	held    chan struct{} // closed once a copy is held
}

// heldPeer is a peer of such a device.
type heldPeer struct {
	cudaipc.Peer
	*heldCopies
}

func (h *heldCopies) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	p, err := h.Device.Import(im)
	return &heldPeer{p, h}, err
}

func (h *heldPeer) Close() error { return h.Peer.Close() }

func (h *heldPeer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	ticket, err := h.Peer.Copy(c)
	if c.Dir == cudaipc.Gather && h.gathers.Add(1) == 2 {
		close(h.held)
	}
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		if h.gathers.Load() >= 2 {
			limit := time.NewTimer(timeout)
			defer limit.Stop()
			select {
			case <-h.release:
			case <-limit.C:
				return cudaipc.Done{}, false, nil
			}
		}
		return ticket(timeout)
	}, err
}

// savesAtItsBudget is a victim that fills its budget of 8 blocks, and is killed while it stores 4
// more.
func savesAtItsBudget(r *rig) {
	_, workers, _ := r.joinEngine(register(victimName))
	w := workers[0]
	w.budget(8)
	if got := w.save(1, chain(5, 8), 0); !all(got, blockOK) {
		panic(fmt.Sprintf("%v", got))
	}
	w.send(&ipc.Save{Job: 99, Epoch: 1, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(6, 4), 0)}})
}

// TestEngineKilledAtItsBudget kills an engine while its blocks are copied into the place of others
// of its own: nothing stays counted for them, and the next engine of the name has the whole budget.
func TestEngineKilledAtItsBudget(t *testing.T) {
	held := &heldCopies{release: make(chan struct{}), held: make(chan struct{})}
	sums := func(c *Config) { c.VerifySample = 0 } // the wrapped device sums nothing
	r := newRig(t, withPool(4<<20), withConfig(sums), withDevice(func(d cudaipc.Device) cudaipc.Device {
		held.Device = d
		return held
	}))
	cmd, _ := r.startVictim("at its budget")
	<-held.held
	if o := r.owner(victimName); o.Bytes != 8*testBlockBytes || o.Evicted != 4 {
		t.Errorf("%+v during the copy", o)
	}
	check(t, cmd.Process.Signal(unix.SIGKILL))
	close(held.release)
	r.waitFor("the dead engine is gone", func(s admin.Status) bool {
		return s.Engines == 0 && s.Sessions == 0 && s.Jobs == 0 && s.Regions == 0
	})
	o, st := r.owner(victimName), r.guests.Status().Pool
	if used := o.Bytes; used != st.Entries*testBlockBytes || st.Partial != 0 || st.Used != used || o.Open {
		t.Errorf("%+v, %d entries, %d partial, %d bytes used", o, st.Entries, st.Partial, st.Used)
	}
	_, again, _ := r.joinEngine(register(victimName))
	again[0].budget(8)
	if got := again[0].save(1, chain(7, 8), 0); !all(got, blockOK) {
		t.Errorf("save by the successor: %v", got)
	}
	if o := r.owner(victimName); o.Bytes != 8*testBlockBytes || o.Refused != 0 {
		t.Errorf("%+v of the successor", o)
	}
}
