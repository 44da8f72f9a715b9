package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/peering"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/tierspec"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// serveSettings are all settings of serve.
type serveSettings struct {
	socketDir            string
	socketGroup          string
	allowUIDs, allowGIDs []uint32
	device               string
	integrity            string
	verify               int   // one block in so many is checked end to end; 0: none
	pace                 int64 // pace.Off, pace.Auto, or bytes per second

	pool        int64  // bytes
	dramPath    string // empty: the pool ends with the process
	hugePages   string
	eviction    string
	keepPercent int

	tiers tierspec.Settings
	peers peering.Settings

	config       string
	http         []string // the address, and names that it answers to
	logLevel     string
	logJSON      bool
	drainTimeout time.Duration
	endIdle      time.Duration // 0: never
}

// Times and limits of serve that no user sets. Tests replace them.
var (
	// takeoverWait is the longest wait for an ending agent to release the directory, and then for
	// its movers to release the pool's file.
	takeoverWait = 10 * time.Second
	gpuLimits    = mover.DefaultLimits
	agentLimits  = agent.DefaultLimits
)

// Values of settings.
const (
	hugeAuto = "auto"
	hugeOff  = "off"
)

// paceWords are the values of --pace that are no rate.
var paceWords = map[string]int64{"auto": pace.Auto, "off": pace.Off}

// defaultPool is small, so that it fits any node.
const defaultPool = 1 << 30

func defaultServeSettings() *serveSettings {
	return &serveSettings{
		socketDir: settings.DefaultSocketDir(), device: settings.DeviceAuto, integrity: settings.IntegrityFull,
		verify: 1000, pace: pace.Auto,
		pool: defaultPool, hugePages: hugeAuto, eviction: evict.DefaultName, keepPercent: 10,
		logLevel: "info", drainTimeout: 10 * time.Second,
	}
}

// flagGroup is the flags of one part of serve, which --help shows together.
type flagGroup struct {
	title string
	*pflag.FlagSet
}

// groups defines all settings: their keys, meaning and allowed values.
func (s *serveSettings) groups() []flagGroup {
	var out []flagGroup
	for _, g := range []struct {
		title string
		add   func(*pflag.FlagSet)
	}{
		{"Engines", s.addEngines}, {"Memory", s.addMemory}, {"Tiers", s.tiers.AddFlags}, {"Nodes", s.peers.AddFlags},
		{"Operation", s.addOperation},
	} {
		f := pflag.NewFlagSet(g.title, pflag.ContinueOnError)
		f.SortFlags = false
		g.add(f)
		out = append(out, flagGroup{g.title, f})
	}
	return out
}

// addFlags adds all settings to a command's flags, and groups them in its usage.
func (s *serveSettings) addFlags(cmd *cobra.Command) {
	groups := s.groups()
	for _, g := range groups {
		cmd.Flags().AddFlagSet(g.FlagSet)
	}
	cmd.SetUsageFunc(func(cmd *cobra.Command) error { return printUsage(cmd.OutOrStderr(), cmd, groups) })
}

// usageWidth is the width of help in columns.
const usageWidth = 100

func printUsage(w io.Writer, cmd *cobra.Command, groups []flagGroup) error {
	_, err := fmt.Fprintf(w, "Usage:\n  %s\n\nExamples:\n%s\n", cmd.UseLine(), cmd.Example)
	for _, g := range groups {
		if err == nil {
			_, err = fmt.Fprintf(w, "\n%s:\n%s", g.title, g.FlagUsagesWrapped(usageWidth))
		}
	}
	return err
}

func (s *serveSettings) addEngines(f *pflag.FlagSet) {
	settings.AddSocketDir(f, &s.socketDir, "directory of the agent's sockets; created if it does not exist")
	f.StringVar(&s.socketGroup, "socket-group", "",
		"group that may use the sockets too (name or number); the directory is then 2770")
	f.Var(settings.IDs(&s.allowUIDs), "allow-uid", "users that may open sessions; default: the agent's own and root")
	f.Var(settings.IDs(&s.allowGIDs), "allow-gid", "groups that may open sessions")
	f.Var(settings.Choice(&s.device, settings.Devices), "device",
		"how engines' memory is reached: auto opens shared memory in the agent and each GPU in a process of its own, "+
			"cuda ends the start without a GPU, host refuses GPUs, host-mover puts shared memory into a process too")
	f.Var(settings.Choice(&s.integrity, []string{settings.IntegrityFull, settings.IntegrityHeader}), "integrity",
		"full adds a checksum of each block's content, computed at save and verified at load and by the tiers")
	f.Var(settings.Count(&s.verify, 0, transfer.MaxSampleEvery), "verify-sample",
		"check one block in so many end to end: at save and at load a sum of the engine's own memory must be that "+
			"of the pool's block; 0 checks none, 1 all, which costs more than the copies")
	f.Var(settings.Rate(&s.pace, paceWords, pace.MinRate, pace.MaxRate), "pace",
		"how saves and writes to tiers give way to decode, on each GPU and on the CPUs: auto slows them while they "+
			"are seen to slow decode steps, a rate is their limit at all times; loads never wait")
}

func (s *serveSettings) addMemory(f *pflag.FlagSet) {
	f.Var(settings.Size(&s.pool, dram.MinBytes, dram.MaxBytes), "pool",
		"memory for blocks; the default is small, set it to what the node can spare")
	f.StringVar(&s.dramPath, "dram-path", "",
		"file on tmpfs or hugetlbfs for the pool, which then outlives the agent; --huge-pages has no effect on it")
	f.Var(settings.Choice(&s.hugePages, []string{hugeAuto, hugeOff}), "huge-pages",
		"auto uses huge pages for the pool if enough are free")
	f.Var(settings.Choice(&s.eviction, evict.Names), "eviction",
		"policy that chooses what to evict: hazard learns which blocks are used again, lru evicts the least recently "+
			"used one")
	f.Var(settings.Count(&s.keepPercent, 0, guests.MaxKeepPercent), "keep-percent",
		"most of the pool, in percent, that blocks may take which hints pin (kv.pin); 0 pins none")
}

func (s *serveSettings) addOperation(f *pflag.FlagSet) {
	f.StringVar(&s.config, settings.FileKey, "", "YAML file with settings")
	f.Var(settings.Names(&s.http), "http",
		"address for HTTP besides admin.sock, such as 127.0.0.1:9480, and after it, separated by commas, the names "+
			"that it answers to besides its address and localhost; it serves metrics, health and status, without a "+
			"login, and changes nothing")
	f.Var(settings.Choice(&s.logLevel, []string{"debug", "info", "warn", "error"}), "log-level",
		"lowest level that is logged")
	f.BoolVar(&s.logJSON, "log-json", false, "log JSON")
	f.Var(settings.Duration(&s.drainTimeout, 0, time.Hour), "drain-timeout", "longest wait for running jobs at the end")
	f.Var(settings.Duration(&s.endIdle, 0, 720*time.Hour), "end-idle",
		"end when no session has been open for so long; 0 is never")
}
