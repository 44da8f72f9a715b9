package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// expectations are what a scenario asks of its run beyond what must hold of any.
type expectations struct {
	everyFault   bool
	inFlight     share
	cleanUp      time.Duration // 0: any
	hitRateOff   share
	overDeadline time.Duration // 0: any
	blocks       []string      // SOURCE=COUNT
	wrongBytes   bool
}

func (x *expectations) addSettings(f *pflag.FlagSet) {
	f.BoolVar(&x.everyFault, "expect-every-fault", false, "each fault happens, and agents of all nodes are killed")
	f.Var(&x.inFlight, "expect-in-flight", "least share of kills, of engines and agents and of movers, in a copy")
	f.Var(settings.Duration(&x.cleanUp, 0, time.Hour), "expect-clean-up",
		"longest clean-up after an engine's death, on a machine that does not stand still; 0 is any")
	f.Var(&x.hitRateOff, "expect-hit-rate-off", "most that the hit rate differs from the simulation's; 0 is any")
	f.Var(settings.Duration(&x.overDeadline, 0, time.Minute), "expect-over-deadline",
		"most that a look-up is over its deadline, on a machine that does not stand still; 0 is any")
	f.Var(settings.Names(&x.blocks), "expect-blocks",
		"least blocks from sources in the agents' last lives, such as redis=40; any=50 counts all lives")
	f.BoolVar(&x.wrongBytes, "expect-wrong-bytes", false, "wrong bytes are found, and nothing else is wrong")
}

// Where a wait of the machine itself ends late, so may what consists of several waits of several
// processes; below quietLag it is no excuse.
const (
	busyFactor = 10
	quietLag   = 5 * time.Millisecond
)

// missed returns what the scenario expects and the run did not show.
func (x *expectations) missed(s *scenario, o *Report) error {
	var bad []error
	miss := func(format string, args ...any) { bad = append(bad, fmt.Errorf("expected: "+format, args...)) }
	if x.everyFault {
		for _, fault := range s.faults(&o.Faults) {
			if *fault.every > 0 && *fault.count == 0 {
				miss("%s at least once", fault.name)
			}
		}
		for node, kills := range o.AgentKillsNode {
			if s.killAgent > 0 && kills == 0 {
				miss("a kill of the agent of node %d", node)
			}
		}
	}
	for _, k := range []struct {
		what        string
		all, flying int
	}{{"kills", o.EngineKills + o.AgentKills, o.KillsInFlight}, {"kills of movers", o.MoverKills, o.MoverInFlight}} {
		if float64(k.flying) < float64(x.inFlight)*float64(k.all) {
			miss("%v of %d %s with a copy in flight, there are %d", x.inFlight, k.all, k.what, k.flying)
		}
	}
	lag := time.Duration(o.MachineLagUS * float64(time.Microsecond))
	took := time.Duration(o.CleanupMaxMS * float64(time.Millisecond))
	if most := x.cleanUp + busyFactor*lag; x.cleanUp > 0 && took >= most {
		miss("clean-up of a dead engine in less than %v, it took %v", most, took)
	}
	over, most := time.Duration(o.OverDeadlineUS*float64(time.Microsecond)), x.overDeadline
	if lag > quietLag {
		most += busyFactor * lag
	}
	if x.overDeadline > 0 && over > most {
		miss("no look-up more than %v over its deadline, one was %v", most, over)
	}
	if off := o.HitRate - o.SimHitRate; x.hitRateOff > 0 && max(off, -off) > float64(x.hitRateOff) {
		miss("a hit rate of %.4f, as simulated, within %v: it is %.4f", o.SimHitRate, x.hitRateOff, o.HitRate)
	}
	for _, text := range x.blocks {
		name, least, _ := leastBlocks(text) // it was checked
		if n := o.from(name); n < least {
			miss("%d blocks from %s, %d came", least, name, n)
		}
	}
	return errors.Join(bad...)
}

// leastBlocks reads one of expect-blocks.
func leastBlocks(text string) (source string, least uint64, err error) {
	source, number, _ := strings.Cut(text, "=")
	if least, err = strconv.ParseUint(number, 10, 64); err != nil {
		err = fmt.Errorf("expect-blocks: %q, allowed: a source, = and a number, such as redis=40", text)
	}
	return source, least, err
}

func (x *expectations) check() (err error) {
	for _, text := range x.blocks {
		_, _, bad := leastBlocks(text)
		err = errors.Join(err, bad)
	}
	return err
}

// from returns the blocks that came from a source, or from any.
func (o *Report) from(name string) uint64 {
	for _, s := range o.Sources {
		if s.Name == name {
			return s.Blocks
		}
	}
	if name == "any" {
		return o.BlocksLoaded
	}
	return 0
}

// fault is a kind of fault: every how many requests it is to happen, and how often it did.
type fault struct {
	name, what   string
	every, count *int
}

func (s *scenario) faults(f *Faults) []fault {
	return []fault{
		{"kill-engine", "kill an engine", &s.killEngine, &f.EngineKills},
		{"kill-agent", "kill an agent, rotating over the nodes,", &s.killAgent, &f.AgentKills},
		{"kill-mover", "kill a mover of an agent", &s.killMover, &f.MoverKills},
		{"kill-helper", "kill an agent's helper (Mooncake's client)", &s.killHelper, &f.HelperKills},
		{"kill-server", "kill the server, and start it again,", &s.killServer, &f.ServerKills},
		{"pause-engine", "stop an engine for a while", &s.pauseEngine, &f.EnginePauses},
		{"pause-agent", "stop an agent for a while, rotating over the nodes,", &s.pauseAgent, &f.AgentPauses},
		{"pause-helper", "stop an agent's helper for a while", &s.pauseHelper, &f.HelperPauses},
		{"pause-server", "stop the server for a while", &s.pauseServer, &f.ServerPauses},
	}
}

// anyFault reports whether anything is to be killed or paused.
func (s *scenario) anyFault() bool {
	return slices.ContainsFunc(s.faults(new(Faults)), func(f fault) bool { return *f.every > 0 })
}

// flip damages a block in the memory of an agent's pool, from outside: it flips a bit in the middle
// of the first layer of the prompt's first block. The agent has no part in it, as with failing
// memory.
func (r *replay) flip(ctx context.Context, a *agentProcess, prompt []uint64) error {
	content, err := mockengine.FirstBlock(&r.cfg, prompt)
	if err != nil {
		return err
	}
	st, err := a.status(ctx)
	if err != nil {
		return err
	}
	files, err := poolFiles(st.PID)
	if err != nil {
		return err
	}
	for _, path := range files {
		found, err := flipIn(path, content)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if found {
			return nil
		}
	}
	return fmt.Errorf("no stored block has the content that is to be damaged, in %d files", len(files))
}

// poolMemory is the prefix of the link of a descriptor that is a pool's memory without a file.
const poolMemory = "/memfd:kvagent-pool"

// poolFiles returns the descriptors, as paths, of a process's pool memory.
func poolFiles(pid int) (files []string, err error) {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range all {
		// An error means that it was closed meanwhile.
		if link, bad := os.Readlink(fd); bad == nil && strings.HasPrefix(link, poolMemory) {
			files = append(files, fd)
		}
	}
	return files, err
}

// flipIn flips a bit in the middle of the content where a file has it, through a mapping: a file of
// huge pages cannot be written to otherwise.
func flipIn(path string, content []byte) (found bool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return false, err
	}
	at := bytes.Index(mem, content)
	if at >= 0 {
		mem[at+len(content)/2] ^= 1
	}
	return at >= 0, unix.Munmap(mem)
}
