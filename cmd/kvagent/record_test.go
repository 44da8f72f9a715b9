package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/trace"
)

// What engines ask is written as a trace, which kvbench reads, until record is interrupted.
func TestRecord(t *testing.T) {
	_, dir, _ := startServe(t)
	file := filepath.Join(t.TempDir(), "monday.jsonl")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	cmd, log := kvagentCommand(t, "record", "--socket-dir", dir), &processLog{}
	cmd.Stdout, cmd.Stderr = out, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	pooltest.Until(t, "a request is recorded", func() bool {
		if text, code := kvagentOutput(t, "mock", "--requests", "3",
			"--socket-dir", dir); code != 0 {
			t.Fatalf("mock: exit %d: %s", code, text)
		}
		info, err := os.Stat(file)
		return err == nil && info.Size() > 0
	})
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(log.String(), "and 0 that were dropped") {
		t.Errorf("%v: %s", err, log)
	}
	requests, err := trace.Read(file, 0)
	if err != nil || len(requests) == 0 || len(requests[0].HashIDs) == 0 {
		t.Errorf("%d requests, %v", len(requests), err)
	}
	// A disk without room ends the recording.
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	log = &processLog{}
	cmd = kvagentCommand(t, "record", "--socket-dir", dir)
	cmd.Stdout, cmd.Stderr = full, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	pooltest.Until(t, "the recording ends", func() bool {
		if text, code := kvagentOutput(t, "mock", "--requests", "3", "--socket-dir", dir); code != 0 {
			t.Fatalf("mock: exit %d: %s", code, text)
		}
		return len(ended) > 0
	})
	if err := <-ended; err == nil || !strings.Contains(log.String(), "no space left") {
		t.Errorf("%v: %s", err, log)
	}
}
