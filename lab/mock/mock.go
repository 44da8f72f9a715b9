// Package mock is the command that plays one inference engine against a running agent.
package mock

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// options has all settings of mock.
type options struct {
	engine     mockengine.Config
	blockBytes int64
	socketDir  string
	lookupName string
	drive      bool
	fill       string
	requests   int
	solo       mockengine.SoloOptions
}

// Command returns the command mock.
func Command() *cobra.Command {
	s := &options{socketDir: settings.DefaultSocketDir(), requests: 100, blockBytes: 16 << 10,
		solo:   mockengine.SoloOptions{Attach: 10 * time.Second},
		engine: mockengine.Config{Name: fmt.Sprintf("mock-%d", os.Getpid()), Model: "mock/solo"}}
	_ = s.engine.Validate() // it sets defaults, which are valid
	cmd := &cobra.Command{
		Use:   "mock",
		Short: "Play an inference engine against a running agent",
		Long: `Mock registers an engine with the agent of a socket directory: a scheduler and a worker, with KV
cache blocks in shared or GPU memory. Every byte is derived from the prompt, so that loaded blocks
can be checked.

With --fill it saves one block for each hash in a file (hex, one a line, a chain from the first on)
and prints "filled N", for tests of other look-up clients against a filled pool. With --hold it
stays registered until it is ended. Otherwise it runs generated conversations, and prints their
outcomes, one JSON object a line.`,
		Example: `  kvbench mock --fill hashes.txt --socket-dir /tmp/kv --lookup-name lookup_rpc_port_0_dp_rank0 \
    --block-size 128 --hold
  kvbench mock --requests 200 --socket-dir /tmp/kv`,
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if s.drive {
				return mockengine.Drive(os.Stdin, cmd.OutOrStdout())
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return s.run(ctx, cmd.OutOrStdout())
		},
	}
	s.addFlags(cmd.Flags())
	return cmd
}

func (s *options) addFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	settings.AddSocketDir(f, &s.socketDir, "directory of the agent's sockets")
	f.StringVar(&s.lookupName, "lookup-name", "",
		"look-up socket that the agent opens for this engine; default: the common one")
	f.StringVar(&s.engine.Model, "model", s.engine.Model, "model; engines with the same model and shape share blocks")
	f.Uint64Var(&s.engine.Seed, "seed", 1, "seed of all random choices")
	f.Var(settings.Duration(&s.solo.Attach, 0, time.Hour), "attach-within", "how long to wait for the agent")
	f.Var(settings.Duration(&s.engine.LookupTimeout, time.Millisecond, time.Minute), "lookup-timeout",
		"a look-up that takes longer is a miss")
	f.StringVar(&s.fill, "fill", "", "file of hex hashes, one a line: save a block for each")
	f.BoolVar(&s.solo.Hold, "hold", false, "stay registered until ended")
	f.Var(settings.Count(&s.requests, 1, 1<<30), "requests", "requests to run")
	devices := []string{mockengine.DeviceHost, mockengine.DeviceCUDA, mockengine.DeviceVirtual}
	f.Var(settings.Choice(&s.engine.Device, devices), "device",
		"memory of the KV cache blocks: host is shared memory, cuda the only visible GPU "+
			"(CUDA_VISIBLE_DEVICES), cuda-virtual the same in pieces of virtual memory")
	f.Var(settings.Count(&s.engine.Blocks, 1, mockengine.MaxBlocks), "engine-blocks", "KV cache blocks")
	f.Var(settings.Count(&s.engine.BlockTokens, 1, 1<<20), "block-size", "tokens of a block hash")
	f.Var(settings.Size(&s.blockBytes, 64, 1<<30), "block-bytes", "bytes of one block on one rank")
	f.Var(settings.Count(&s.solo.KillAfter, 0, 1<<30), "kill-self-after",
		"kill this process (SIGKILL) while a job is in flight, after this many jobs")
	f.BoolVar(&s.drive, "drive", false, "read commands from standard input and write reports to standard output")
	f.Lookup("drive").Hidden = true
}

// run runs requests through one engine, or saves a block for each hash of the file to fill from.
func (s *options) run(ctx context.Context, out io.Writer) error {
	link := mockengine.LinkConfig{Session: filepath.Join(s.socketDir, "session.sock"), LookupName: s.lookupName}
	s.engine.BlockBytes = int(s.blockBytes)
	if err := s.engine.Validate(); err != nil {
		return settings.Invalid(err)
	}
	if s.fill == "" {
		requests := mockengine.DrawRequests(s.engine.Seed, s.requests)
		return mockengine.Solo(ctx, s.engine, link, requests, s.solo, out)
	}
	hashes, err := readHashes(s.fill)
	if err != nil {
		return settings.Invalid(err)
	}
	return mockengine.Fill(ctx, s.engine, link, hashes, s.solo.Attach, func() {
		fmt.Fprintf(out, "filled %d\n", len(hashes))
		if s.solo.Hold {
			<-ctx.Done()
		}
	})
}

// readHashes reads a chain of block hashes, hex, between blanks or lines. All have one length.
func readHashes(path string) ([][]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var hashes [][]byte
	for i, text := range strings.Fields(string(b)) {
		h, err := hex.DecodeString(text)
		if err != nil || len(h) < 1 || len(h) > ipc.MaxHashLen || len(hashes) > 0 && len(h) != len(hashes[0]) {
			return nil, fmt.Errorf("%s: hash %d: %q, allowed: 1 to %d bytes in hex, all as long as the first",
				path, i+1, text, ipc.MaxHashLen)
		}
		hashes = append(hashes, h)
	}
	return hashes, nil
}
