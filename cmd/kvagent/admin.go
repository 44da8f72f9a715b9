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

	"github.com/spf13/cobra"
)

// defaultSocketDir is where an agent is looked for, and serves, unless told otherwise.
const defaultSocketDir = "/run/kvagent"

// Limits of a question to an agent.
const (
	adminTimeout  = 5 * time.Second
	maxAdminReply = 16 << 20 // bytes
)

// adminClient asks a running agent through its admin.sock.
type adminClient struct {
	path   string
	client http.Client
}

func newAdmin(dir string) *adminClient {
	path := filepath.Join(dir, "admin.sock")
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	return &adminClient{path: path, client: http.Client{
		Timeout: adminTimeout, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true},
	}}
}

func (a *adminClient) get(ctx context.Context, path string) ([]byte, error) {
	return a.do(ctx, http.MethodGet, path)
}

func (a *adminClient) post(ctx context.Context, path string) ([]byte, error) {
	return a.do(ctx, http.MethodPost, path)
}

func (a *adminClient) do(ctx context.Context, method, path string) ([]byte, error) {
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

// socketDirSetting is the one setting that all commands share.
func socketDirSetting() *string {
	dir := defaultSocketDir
	return &dir
}

func addSocketDir(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "socket-dir", *dir, "directory of the agent's sockets")
}

// configError is an error with the exit code of a setting that is not allowed.
func configError(err error) error {
	if err == nil {
		return nil
	}
	return exitError{exitConfig, err}
}
