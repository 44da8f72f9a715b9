package main

import (
	"path/filepath"
	"testing"

	"github.com/kvagent/kvagent/pool/servertest"
)

func (o *replayed) from(name string) uint64 {
	for _, s := range o.Sources {
		if s.Name == name {
			return s.Blocks
		}
	}
	return 0
}

// A pool much smaller than the trace serves most of it from disk, every byte checked, also when
// agent and engines are killed.
func TestReplayOverDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a replay over four lives")
	}
	t.Parallel()
	disk := "disk:" + filepath.Join(t.TempDir(), "disk") + "?capacity=1GiB&write=save"
	o := replayJSON(t, append(patientEngines, "requests: 400", "pool: 24MiB", "engine-blocks: 600",
		"tier: "+disk+"&"+patientTier)...)
	o.clean(t)
	if got := o.from("disk"); got < 500 {
		t.Errorf("%d blocks came from disk, want 500 and more: %+v", got, o.Sources)
	}
	if o.HitRate < o.SimHitRate+0.05 {
		t.Errorf("hit rate %.3f, without the tier it would be %.3f", o.HitRate, o.SimHitRate)
	}
	o = replayJSON(t, "requests: 300", "pool: 24MiB", "engine-blocks: 600", "tier: "+disk,
		"kill-agent-every: 100", "kill-engine-every: 100")
	o.clean(t)
	if o.AgentKills == 0 {
		t.Error("the agent was not killed")
	}
}

// Options of a tier, and of a replay, that wait for what comes late because the machine is busy. A
// question that its store answers too late for the tier, or a look-up that is answered too late for
// the engine, costs the rest of a prompt: then hits tell how fast the machine is, and not whether
// they are found.
const patientTier = "within=1m"

var patientEngines = []string{"lookup-timeout: 10s"}

// sharedBy holds 365 of the 374 blocks that another node saved within 6 s to come from a store.
// What comes while the machine stands still is late.
func (o *replayed) sharedBy(t *testing.T, store string) {
	t.Helper()
	got, least := int(o.from(store)), 365-int(374*o.MachineLagUS/6e6)
	if got < least {
		t.Errorf("%d blocks came from %s, want %d and more: %+v", got, store, least, o.Sources)
	}
}

// Two agents over one store: the blocks of one are hits on the other.
func TestReplayTwoNodes(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: several nodes")
	}
	addr := servertest.Redis(t).Addr
	o := replayJSON(t, append(patientEngines, "requests: 300", "pace: 6s", "nodes: 2",
		"shared: redis://"+addr+"?"+patientTier)...)
	o.clean(t)
	o.sharedBy(t, "redis")
	if o.BlocksHitOther == 0 {
		t.Error("no node hit what another saved")
	}
}

// A server that stops for a while, and then dies, costs hits and nothing else.
func TestReplayServerStops(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	server, spec := redisCommand(t)
	o := replayJSON(t, "requests: 400", "pace: 3s", "pool: 24MiB", "engine-blocks: 600",
		"shared: "+spec, "server: "+server, "tiers-within: 1m", "pause-server-every: 210", "pause-for: 600ms",
		"kill-server-every: 330", "server-down: 1h")
	o.clean(t)
	if o.Requests != 400 || o.ServerPauses == 0 || o.ServerKills != 1 {
		t.Errorf("%d requests of 400; the server was stopped %d times and killed %d times, and is to die once",
			o.Requests, o.ServerPauses, o.ServerKills)
	}
}
