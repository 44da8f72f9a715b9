package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// maxFill bounds the hashes of a --fill file.
const maxFill = 16 << 20

// runFill saves a block for each hash of the file, and stays if it is told to.
func (s *mockSettings) runFill(ctx context.Context, out io.Writer) error {
	hashes, err := readHashes(s.fill)
	if err != nil {
		return settings.Invalid(err)
	}
	wait, stop := context.WithTimeout(ctx, s.attach)
	defer stop()
	f, err := mockengine.NewFiller(wait, s.config(), s.link())
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Save(ctx, hashes); err != nil {
		return err
	}
	space, path := f.Space()
	fmt.Fprintf(out, "space %x\nlookup %s\nfilled %d\n", space, path, len(hashes))
	if s.hold {
		<-ctx.Done()
	}
	return nil
}

// readHashes reads a chain of block hashes, hex, one a line. All have one length; empty lines are left out.
func readHashes(path string) ([][]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var hashes [][]byte
	in := bufio.NewScanner(f)
	for line := 1; in.Scan(); line++ {
		text := strings.TrimSpace(in.Text())
		if text == "" {
			continue
		}
		h, err := hex.DecodeString(text)
		if err != nil || len(h) < 1 || len(h) > ipc.MaxHashLen || len(hashes) > 0 && len(h) != len(hashes[0]) {
			return nil, fmt.Errorf("%s: line %d: %q, allowed: 1 to %d bytes in hex, all lines as long as the first", path, line, text, ipc.MaxHashLen)
		}
		if len(hashes) == maxFill {
			return nil, fmt.Errorf("%s: more than %d hashes", path, maxFill)
		}
		hashes = append(hashes, h)
	}
	return hashes, in.Err()
}
