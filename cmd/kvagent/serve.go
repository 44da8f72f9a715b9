package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

func serveCommand() *cobra.Command {
	s := defaultServeSettings()
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the agent of this node",
		Long: `Serve keeps the pool, opens the sockets in the socket directory, and serves the
engines of this node until it gets a signal, or is idle for --end-idle.

Every setting may be given as a flag, as KVAGENT_... in the environment (--socket-dir is KVAGENT_SOCKET_DIR), or in
the YAML file of --config (socket-dir: ...), in this order of precedence.

SIGTERM or SIGINT ends it: it refuses new jobs, waits at most --drain-timeout for running ones, notifies the
engines and exits. After a second signal it does not wait for the jobs. A process that has not ended 15 s after that,
such as a mover in a driver call that does not return, stays, and the next agent starts with an empty pool.

With --dram-path the pool is a file that outlives the agent: the next agent with that file has its blocks.

Exit codes: 0 ended by a signal, or idle; 1 failed; 2 a setting is not allowed; 3 another agent serves the directory
or has the pool's file; 4 ended, but jobs were cut off, or movers remain.`,
		Example: `  kvagent serve --socket-dir /tmp/kv --pool 1GiB
  kvagent serve --pool 64GiB --socket-group kv --http 127.0.0.1:9480
  KVAGENT_POOL=64GiB kvagent serve --config /etc/kvagent.yaml`,
		Args: settings.Args(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := settings.Fill(cmd.Flags(), os.LookupEnv); err != nil {
				return settings.Invalid(err)
			}
			return settings.Invalid(s.check())
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := s.logger()
			if err != nil {
				return settings.Invalid(err)
			}
			defer func() { _ = log.Sync() }() // stderr has nothing to sync
			// net/http logs to the standard logger what tiers' servers send unasked, as often as
			// they like.
			restore, err := zap.RedirectStdLogAt(log, zapcore.DebugLevel)
			if err != nil {
				return err
			}
			defer restore()
			if unknown := settings.UnknownEnv(cmd.Flags(), os.Environ()); len(unknown) > 0 {
				log.Warn("unknown KVAGENT_ variables in the environment", zap.Strings("names", unknown))
			}
			return serve(cmd.Context(), s, log)
		},
	}
	s.addFlags(cmd)
	return cmd
}

// agentConfig returns the configuration of the agent's core, and of its guests.
func (s *serveSettings) agentConfig() (c agent.Config, o guests.Options, err error) {
	group, err := parseGroup(s.socketGroup)
	if err != nil {
		return c, o, err
	}
	dir, err := filepath.Abs(s.socketDir) // engines get paths in it, and have other working directories
	if err != nil {
		return c, o, fmt.Errorf("socket-dir: %w", err)
	}
	v, _ := build()
	c = agent.Config{
		Dir: dir, SocketGroup: group, AllowUIDs: s.allowUIDs, AllowGIDs: s.allowGIDs, Integrity: transfer.Full,
		VerifySample: uint32(s.verify), Limits: agentLimits,
		Version: v, Pace: s.pace, CPUPacer: pace.New(s.pace, nil),
	}
	o = guests.Options{
		KeepPercent: s.keepPercent, Ranks: s.eviction != evict.LRUName, Tokens: s.tiers.TokensFile(s.dramPath),
		History: history.New(),
	}
	if len(s.http) > 0 {
		o.HTTP.HTTP, o.HTTP.HTTPNames = s.http[0], s.http[1:]
	}
	if s.integrity == settings.IntegrityHeader {
		c.Integrity = transfer.Header
	}
	return c, o, nil
}

// check validates the combination of settings. It runs once, before anything is opened.
func (s *serveSettings) check() error {
	var bad []error
	if _, err := parseGroup(s.socketGroup); err != nil {
		bad = append(bad, err)
	}
	if len(s.http) > 0 {
		bad = append(bad, admin.CheckHTTP(s.http[0], s.http[1:]))
	}
	if s.dramPath != "" {
		if path, err := filepath.Abs(s.dramPath); err == nil {
			s.dramPath = path
		}
	}
	return errors.Join(append(bad, s.tiers.Check(s.socketDir), s.peers.Check())...)
}

// parseGroup parses a group's name or number; 0 is none.
func parseGroup(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	if gid, err := strconv.ParseUint(text, 10, 31); err == nil {
		return int(gid), nil
	}
	g, err := user.LookupGroup(text)
	if err != nil {
		return 0, fmt.Errorf("socket-group: %q, allowed: the name or the number of a group", text)
	}
	return strconv.Atoi(g.Gid)
}

// logger returns a logger that writes to stderr.
func (s *serveSettings) logger() (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(s.logLevel)
	if err != nil {
		return nil, fmt.Errorf("log-level: %w", err)
	}
	cfg := zap.NewProductionConfig()
	cfg.Level, cfg.Sampling, cfg.DisableStacktrace = zap.NewAtomicLevelAt(level), nil, true
	cfg.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	cfg.EncoderConfig.EncodeDuration = zapcore.StringDurationEncoder
	if !s.logJSON {
		cfg.Encoding, cfg.DisableCaller = "console", true
	}
	return cfg.Build()
}

// endWithin bounds the end of an agent after --drain-timeout: a mover closes its regions or is
// killed and reaped, and the kernel unmaps a large pool. With the default of --drain-timeout the
// sum is less than the 30 s that Kubernetes gives.
var endWithin = 15 * time.Second

// boundEnd ends the process when its end takes too long after ctx is done, because a mover in a
// driver call that does not return cannot be reaped; the end of now ends the drain. The fence stays
// valid: the mover still holds the engines' sockets, so engines do not take their memory for free.
// The agent's own files are as after a kill. over says that everything has ended.
func boundEnd(ctx, now context.Context, drain time.Duration, log *zap.Logger) (over func()) {
	timer := time.AfterFunc(time.Hour, func() {
		log.Error("the end takes too long: the agent exits at once, and movers that do not end stay",
			zap.Duration("waited", endWithin))
		_ = log.Sync() // stderr has nothing to sync
		os.Exit(exitCut)
	})
	timer.Stop() // until ctx is done
	first := context.AfterFunc(ctx, func() { timer.Reset(drain + endWithin) })
	second := context.AfterFunc(now, func() { timer.Reset(endWithin) })
	return func() {
		first()
		second()
		timer.Stop()
	}
}

// idleLooks is how often, at least, the sessions are looked at within --end-idle, and idleLook the
// longest pause between two looks. The agent ends at most one pause late, and never early.
const (
	idleLooks = 16
	idleLook  = time.Second
)

// untilIdle returns true when no session has been open for as long as limit, which counts from now,
// and false when ctx is done. sessions returns how many are open, and the newest one's number.
func untilIdle(ctx context.Context, limit time.Duration, sessions func() (open int, newest uint64)) bool {
	_, last := sessions()
	since := time.Now()
	look := time.NewTicker(min(max(limit/idleLooks, time.Millisecond), idleLook))
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-look.C:
		}
		switch open, newest := sessions(); {
		case open > 0 || newest != last:
			last, since = newest, time.Now()
		case time.Since(since) >= limit:
			return true
		}
	}
}
