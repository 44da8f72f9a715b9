package mixintest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
)

// scrape starts `bin/kvagent` with a disk tier and returns the series that it exports.
func scrape(t *testing.T) []labels.Labels {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv") // short, for the paths of sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// Ended before the test's own time is up, so that no agent is left and its log is shown.
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	t.Cleanup(cancel)
	serve := exec.CommandContext(ctx, "../../bin/kvagent", "serve", "--socket-dir", dir, "--pool", "16MiB",
		"--tier", "disk:"+filepath.Join(dir, "tier")+"?capacity=1GiB")
	stderr, err := serve.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	t.Cleanup(func() {
		_ = serve.Process.Signal(syscall.SIGTERM)
		_, _ = io.Copy(io.Discard, stderr)
		_ = serve.Wait()
	})
	lines := bufio.NewScanner(stderr)
	log := ""
	for !strings.Contains(log, readyLine) {
		if !lines.Scan() {
			t.Fatalf("the agent ended before it was ready:\n%s", log)
		}
		log += lines.Text() + "\n"
	}
	return parse(t, get(t, filepath.Join(dir, "admin.sock")))
}

// startTime is much longer than an agent needs to start and to answer.
const startTime = 2 * time.Minute

// readyLine is in the line of the log that says that the agent is ready.
const readyLine = "\tinfo\tready\t"

func get(t *testing.T, socket string) []byte {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	answer, err := client.Get("http://agent/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("/metrics: %s, %v", answer.Status, err)
	}
	return text
}

func parse(t *testing.T, text []byte) []labels.Labels {
	t.Helper()
	var all []labels.Labels
	p := textparse.NewPromParser(text, labels.NewSymbolTable(), false)
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if entry == textparse.EntrySeries {
			var l labels.Labels
			p.Labels(&l)
			all = append(all, l)
		}
	}
}
