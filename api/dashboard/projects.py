"""GET …/projects and its forms: what an account is divided into, by who administers it: names, states, models."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from starlette.responses import RedirectResponse, Response

from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.errors import PageUnknown
from tenancy import projects, provisioning
from tenancy.errors import NameTaken
from tenancy.provisioning import ProvisioningInvalid


class ProjectPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return await self._page(visit)

    async def open(self, visit: Visit) -> Response:
        deed = partial(projects.open_project, by=visit.actor)
        return await self._done(visit, deed, visit.account_id, visit.form.get("name", ""))

    async def change(self, visit: Visit) -> Response:
        """deed: rename, archive, restore, or models, of which none ticked is what the account may."""
        deed, by = visit.request.path_params["deed"], visit.actor
        if deed == "rename":
            change = partial(projects.change_project, name=visit.form.get("name", ""), by=by)
        elif deed in {"archive", "restore"}:
            change = partial(projects.change_project, archived=deed == "archive", by=by)
        elif deed == "models":
            change = partial(projects.set_models, models=visit.form_lists.get("models"), by=by)
        else:
            raise PageUnknown
        return await self._done(visit, change, visit.account_id, visit.request.path_params["project_id"])

    async def _done(self, visit: Visit, deed: Callable[..., object], *arguments: str) -> Response:
        database = visit.services.database
        try:
            await database.call(deed, database, *arguments)
        except (NameTaken, ProvisioningInvalid) as error:
            return await self._page(visit, fault=str(error), status=400)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/projects", 303)

    async def _page(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        database = visit.services.database
        keys = await database.call(provisioning.list_keys, database, visit.account_id)
        found = await database.call(projects.list_projects, database, visit.account_id)
        served = {card.id for card in visit.services.catalogue.all()}
        return self._pages.page(
            visit,
            "projects.html.j2",
            here="projects",
            title="Projects",
            status=status,
            projects=found,
            # What is served no more stays in the lists that name it until it is unticked.
            models={one.id: sorted(served.union(one.models or ())) for one in found},
            keys=Counter(key.project_id or visit.account_id for key in keys if key.revoked_at_ns is None),
            fault=fault,
            form=visit.form if fault else {},
        )
