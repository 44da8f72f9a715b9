package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"time"
)

// defaultSocketDir is where an agent is looked for, and serves, unless told otherwise.
const defaultSocketDir = "/run/kvagent"

// Limits of a question to an agent.
const (
	adminTimeout  = 5 * time.Second
	maxAdminReply = 16 << 20 // bytes
)

// admin asks a running agent through its admin.sock.
type admin struct {
	path   string
	client http.Client
}

func newAdmin(dir string) *admin {
	path := filepath.Join(dir, "admin.sock")
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	return &admin{path: path, client: http.Client{
		Timeout: adminTimeout, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true},
	}}
}

// within gives an answer as long as this instead of adminTimeout.
func (a *admin) within(d time.Duration) { a.client.Timeout = d }

func (a *admin) get(ctx context.Context, path string) ([]byte, error) {
	return a.do(ctx, http.MethodGet, path)
}

func (a *admin) post(ctx context.Context, path string) ([]byte, error) {
	return a.do(ctx, http.MethodPost, path)
}

func (a *admin) do(ctx context.Context, method, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://kvagent"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			return nil, fmt.Errorf("no agent answers at %s: %w (is kvagent serve running with this --socket-dir?)", a.path, op.Err)
		}
		return nil, fmt.Errorf("the agent at %s does not answer: %w", a.path, err)
	}
	defer func() { _ = resp.Body.Close() }() // it was read to its end, or its error is told
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminReply))
	if err != nil {
		return nil, fmt.Errorf("the agent at %s broke off: %w", a.path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s", strings.TrimSpace(string(body)))
	}
	return body, nil
}
