package main

import (
	"time"

	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// serveSettings are all settings of serve.
type serveSettings struct {
	config    string
	socketDir string

	pool         int64 // bytes
	hugePages    string
	dramPath     string // empty: the pool ends with the process
	takeoverWait time.Duration
	eviction     string
	device       string
	gpuStart     time.Duration
	gpuImport    time.Duration

	socketGroup          string
	allowUIDs, allowGIDs []uint32
	lookups              map[string][16]byte

	integrity   string
	verify      int   // one block in so many is checked end to end; 0: none
	leaseBytes  int64 // 0: half of the pool
	copyLanes   int   // 0: one per processor
	pace        int64 // pace.Off, pace.Auto, or bytes per second
	keepPercent int
	queue       int
	eventWait   time.Duration
	stuckAfter  time.Duration
	maxEngines  int
	maxSessions int

	http         string
	httpAny      bool
	logLevel     string
	logJSON      bool
	drainTimeout time.Duration
	endIdle      time.Duration // 0: never

	tiers tierSettings
	peers peerSettings
}

// Values of settings.
const (
	hugeAuto = "auto"
	hugeOff  = "off"
)

// defaultVerifySample is the share of blocks that are checked end to end: one in so many.
const (
	defaultVerifySample = 1000
	defaultKeepPercent  = 10
)

// paceWords are the values of --pace that are no rate.
var paceWords = map[string]int64{"auto": pace.Auto, "off": pace.Off}

// defaultPool is small, so that it fits any node.
const defaultPool = 1 << 30

func defaultServeSettings() *serveSettings {
	d := agent.DefaultLimits
	return &serveSettings{
		socketDir: settings.DefaultSocketDir(), pool: defaultPool, hugePages: hugeAuto, device: settings.DeviceAuto,
		gpuStart: mover.DefaultLimits.Start, gpuImport: mover.DefaultLimits.Import,
		eviction: evict.DefaultName,
		lookups:  map[string][16]byte{}, integrity: settings.IntegrityFull, verify: defaultVerifySample,
		pace:  pace.Auto,
		queue: d.Transfer.Queue, eventWait: d.Transfer.EventWait,
		keepPercent: defaultKeepPercent,
		stuckAfter:  d.Stuck, maxEngines: d.Engines, maxSessions: d.Sessions, logLevel: "info",
		drainTimeout: 10 * time.Second, takeoverWait: 10 * time.Second,
	}
}

// addFlags defines all settings: their keys, meaning and allowed values.
func (s *serveSettings) addFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	settings.AddSocketDir(f, &s.socketDir,
		"directory of the agent's sockets; created if it does not exist")
	f.Var(settings.Size(&s.pool, dram.MinBytes, dram.MaxBytes), "pool",
		"memory for blocks; the default is small, set it to what the node can spare")
	f.StringVar(&s.config, settings.FileKey, "", "YAML file with settings")
	f.Var(settings.Choice(&s.device, settings.Devices), "device",
		"how engines' memory is reached: auto opens shared memory in the agent and each GPU in a process of its own, "+
			"cuda ends the start without a GPU, host refuses GPUs, host-mover puts shared memory into a process too")
	f.Var(settings.Duration(&s.gpuStart, time.Second, time.Hour), "gpu-start-within",
		"longest time for a GPU's process to open it, before it is killed; without persistence "+
			"mode drivers of many GPUs take long")
	f.Var(settings.Duration(&s.gpuImport, time.Second, time.Hour), "gpu-import-within",
		"longest time for a GPU's process to open one engine worker's memory before it is killed")
	f.Var(settings.Choice(&s.hugePages, []string{hugeAuto, hugeOff}), "huge-pages",
		"auto uses huge pages for the pool if enough are free")
	f.StringVar(&s.dramPath, "dram-path", "",
		"file on tmpfs or hugetlbfs for the pool, which then outlives the agent; --huge-pages has no effect on it")
	f.Var(settings.Duration(&s.takeoverWait, 0, time.Hour), "takeover-wait",
		"longest wait for an ending agent and its movers to release the directory and the pool's file")
	f.Var(settings.Choice(&s.eviction, evict.Names), "eviction",
		"policy that chooses what to evict: hazard learns which blocks are used again, lru evicts the least recently "+
			"used one")
	f.Var(settings.Choice(&s.integrity, []string{settings.IntegrityFull, settings.IntegrityHeader}), "integrity",
		"full adds a checksum of each block's content, computed at save and verified at load and by the tiers")
	f.Var(settings.Count(&s.verify, 0, transfer.MaxSampleEvery), "verify-sample",
		"check one block in so many end to end: at save and at load a sum of the engine's own memory must be that "+
			"of the pool's block; 0 checks none, 1 all, which costs more than the copies")
	f.Var(settings.Size(&s.leaseBytes, 0, dram.MaxBytes), "lease-bytes",
		"most bytes that one engine's leases may pin; 0 is half of the pool")
	f.Var(settings.Count(&s.keepPercent, 0, agent.MaxKeepPercent), "keep-percent",
		"most of the pool, in percent, that blocks may take which requests want kept (kvagent.pin); 0 keeps none")

	s.tiers.addFlags(f)
	s.peers.addFlags(f)

	f.StringVar(&s.socketGroup, "socket-group", "",
		"group that may use the sockets too (name or number); the directory is then 2770")
	f.Var(settings.IDs(&s.allowUIDs), "allow-uid", "users that may open sessions; default: the agent's own and root")
	f.Var(settings.IDs(&s.allowGIDs), "allow-gid", "groups that may open sessions")
	f.Var(settings.Lookups(s.lookups), "lookup",
		"look-up socket NAME for the space with this fingerprint, open from the start; may be given several times")

	f.StringVar(&s.http, "http", "",
		"address for HTTP besides admin.sock, such as 127.0.0.1:9480; it serves metrics, health and status, and "+
			"changes nothing")
	settings.AddBool(f, &s.httpAny, "http-any", "allow --http to be an address that is not loopback")
	f.Var(settings.Choice(&s.logLevel, []string{"debug", "info", "warn", "error"}), "log-level",
		"lowest level that is logged")
	settings.AddBool(f, &s.logJSON, "log-json", "log JSON")
	f.Var(settings.Duration(&s.drainTimeout, 0, time.Hour), "drain-timeout", "longest wait for running jobs at the end")
	f.Var(settings.Duration(&s.endIdle, 0, 720*time.Hour), "end-idle",
		"end when no session has been open for so long; 0 is never")

	f.Var(settings.Count(&s.copyLanes, 0, 256), "copy-lanes",
		"copies that run at once on one GPU, and on CPUs; 0 is as many as there are processors")
	f.Var(settings.Rate(&s.pace, paceWords, pace.MinRate, pace.MaxRate), "pace",
		"how saves and writes to tiers give way to decode, on each GPU and on the CPUs: auto slows them while they "+
			"are seen to slow decode steps, a rate is their limit at all times; loads never wait")
	f.Var(settings.Count(&s.queue, 1, 1<<16), "queue",
		"jobs that may wait for one engine worker in each direction; a further one is answered busy")
	f.Var(settings.Duration(&s.eventWait, time.Millisecond, time.Hour), "event-wait",
		"longest wait for the step that a job names")
	f.Var(settings.Duration(&s.stuckAfter, time.Second, 24*time.Hour), "stuck-after",
		"a worker's step older than this fails /livez")
	f.Var(settings.Count(&s.maxEngines, 1, 4096), "max-engines", "engines at once")
	f.Var(settings.Count(&s.maxSessions, 1, 2048), "max-sessions",
		"sessions at once: one for each scheduler and each rank")
}
